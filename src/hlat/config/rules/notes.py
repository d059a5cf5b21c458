"""Warnings about settings that are allowed but odd, printed before training.

valid recipe -> sentences
"""

from collections.abc import Iterator

from hlat.config.recipe import Recipe


def recipe_notes(recipe: Recipe) -> Iterator[str]:
    """Yield one sentence per odd setting."""
    yield from _warmup(recipe)
    yield from _ramp(recipe)


def _warmup(recipe: Recipe) -> Iterator[str]:
    warmup, steps, horizon = recipe.schedule.warmup_steps, recipe.total_steps, recipe.horizon_steps
    if steps <= warmup < horizon:  # a warm-up as long as the whole schedule is refused
        highest = recipe.optimizer.lr * steps / warmup
        yield (
            f"schedule.warmup_steps={warmup}: the run ends at step {steps}, within the warm-up, and the learning rate "
            f"gets no further than {highest:.3g}; optimizer.lr={recipe.optimizer.lr:g} is "
            f"{'reached in its last step' if steps == warmup else 'never reached'}."
        )


def _ramp(recipe: Recipe) -> Iterator[str]:
    stages, steps = recipe.batch.ramp, recipe.total_steps
    if stages and steps <= sum(count for count, _ in recipe.batches.ramp):
        reached = len(recipe.batches.in_steps(steps))
        yield (
            f"batch.ramp: the run ends at step {steps}, in stage {reached} of {len(stages)}; "
            f"batch.global_batch={recipe.batch.global_batch} is never reached."
        )
