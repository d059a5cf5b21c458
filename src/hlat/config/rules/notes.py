"""Oddities of a recipe that are allowed, and are said before it is trained.

recipe, valid -> sentences
"""

from collections.abc import Iterator

from hlat.config.recipe import Recipe


def recipe_notes(recipe: Recipe) -> Iterator[str]:
    """One sentence for each."""
    warmup, steps, horizon = recipe.schedule.warmup_steps, recipe.total_steps, recipe.horizon_steps
    if steps <= warmup < horizon:  # a warm-up as long as the whole schedule is refused
        highest = recipe.optimizer.lr * steps / warmup
        yield (
            f"schedule.warmup_steps={warmup}: the run ends at step {steps}, within the warm-up, and the learning rate "
            f"gets no further than {highest:.3g}; optimizer.lr={recipe.optimizer.lr:g} is "
            f"{'reached in its last step' if steps == warmup else 'never reached'}."
        )
