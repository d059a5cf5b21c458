"""Warnings about values that are allowed but odd: the one table of them.

    valid recipe --ODD_VALUES--> SettingNote: rule, field and value, why it is odd, what would be usual

A note never stops a run. `hlat check` prints it, and so does the start of a run. What is odd only in view of the text
or the machine (passes over the text, more processes than cores) is in ``hlat.launch.start_checks``.

To add a rule, write a function that yields what is odd, and add its line to the table.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hlat.config.recipe import Recipe
from hlat.runtime.terminal import plural

_LONG_RUN = 2000  # steps from which a run without warm-up is odd
_LOGGED_RUN = 50  # steps from which a run without metrics is odd
_FEW_TOKENS = 512  # of a forward pass: fewer leave the matrix units of any device idle
_EVALUATION_SHARE = 0.5  # of the time of a run: a forward pass is a third of a training step
_STEPS_PER_EVALUATION = 3


@dataclass(frozen=True)
class SettingNote:
    """A warning about a setting: what is odd, and why."""

    rule: str  # name of the rule
    text: str
    usual: str = ""  # what would be usual, a sentence; empty if the text says it
    kind: str = "warning"  # or "note": nothing is wrong

    def __str__(self) -> str:
        return f"{self.text} {self.usual}".rstrip() + f" [{self.rule}]"


@dataclass(frozen=True)
class OddValue:
    """A rule that finds what is odd about some fields."""

    name: str  # stable name in a few words with dashes
    find: Callable[[Recipe], Iterator[str]]  # yields sentences: field and value, why it is odd
    usual: str  # what would be usual, a sentence


def odd_settings(recipe: Recipe) -> Iterator[SettingNote]:
    """Yield a note for each rule that finds something."""
    said = set[str]()
    for stage in recipe.each_stage():
        found = [(rule, text) for rule in ODD_VALUES for text in rule.find(stage) if text not in said]
        said |= {text for _, text in found}
        where = "" if stage.place is None or not stage.place.index else f"stage {stage.place.stage.name}: "
        yield from (SettingNote(rule.name, where + text, rule.usual) for rule, text in found)


def _learning_rate(recipe: Recipe) -> Iterator[str]:
    optimizer = recipe.optimizer
    rates = {"optimizer.lr": optimizer.lr, "optimizer.adamw_lr": getattr(optimizer, "adamw_lr", None)}
    for path, lr in rates.items():
        if lr is not None and lr > 0.02:
            yield f"{path}={lr:g}: the first steps at this rate usually end in a loss that is not finite."
        elif lr is not None and lr < 1e-6:
            yield f"{path}={lr:g}: the weights hardly move."


def _betas(recipe: Recipe) -> Iterator[str]:
    betas = getattr(recipe.optimizer, "betas", ())
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        return  # an optimizer without moments
    first, second = betas
    if not 0.5 <= first <= 0.99:
        yield f"optimizer.betas[0]={first:g}: the gradient is averaged over {_updates(first)}."
    if not 0.9 <= second <= 0.9999:
        yield f"optimizer.betas[1]={second:g}: its square is averaged over {_updates(second)}."
    if first > second:
        yield f"optimizer.betas={[first, second]}: the gradient is averaged over more updates than its square."


def _updates(beta: float) -> str:
    return f"about {1 / (1 - beta):,.0f} updates"


def _weight_decay(recipe: Recipe) -> Iterator[str]:
    decay = getattr(recipe.optimizer, "weight_decay", 0.0)
    if decay > 0.5:
        share = min(1.0, decay * recipe.optimizer.lr)
        yield f"optimizer.weight_decay={decay:g}: each step at the peak takes away {share:.2%} of every weight."


def _epsilon(recipe: Recipe) -> Iterator[str]:
    eps = getattr(recipe.optimizer, "eps", 1e-8)
    if eps > 1e-5:
        yield f"optimizer.eps={eps:g}: it outweighs the second moment of small gradients, whose updates shrink."
    elif eps < 1e-20:
        yield f"optimizer.eps={eps:g}: it does not protect from a second moment of zero."


def _clipping(recipe: Recipe) -> Iterator[str]:
    norm = recipe.optimizer.clip_norm
    if norm is not None and norm > 100:
        yield f"optimizer.clip_norm={norm:g}: gradients are practically never clipped."
    elif norm is not None and norm < 0.01:
        yield f"optimizer.clip_norm={norm:g}: practically every gradient is clipped."


def _z_loss(recipe: Recipe) -> Iterator[str]:
    if recipe.optimizer.z_loss > 1e-2:
        yield f"optimizer.z_loss={recipe.optimizer.z_loss:g}: this term outweighs the loss."


def _warmup(recipe: Recipe) -> Iterator[str]:
    warmup, steps, horizon = recipe.schedule.warmup_steps, recipe.total_steps, recipe.horizon_steps
    if steps <= warmup < horizon:  # a warm-up as long as the whole schedule is refused
        highest = recipe.optimizer.lr * steps / warmup
        yield (
            f"schedule.warmup_steps={warmup}: the run ends at step {steps}, within the warm-up, and the learning rate "
            f"gets no further than {highest:.3g}; optimizer.lr={recipe.optimizer.lr:g} is "
            f"{'reached in its last step' if steps == warmup else 'never reached'}."
        )
    elif warmup > steps / 2:
        yield f"schedule.warmup_steps={warmup}: that is {warmup / steps:.0%} of the {plural(steps, 'step')} of the run."


def _no_warmup(recipe: Recipe) -> Iterator[str]:
    fresh = recipe.checkpoint.init_from is None and (recipe.place is None or not recipe.place.schedule_first)
    if fresh and recipe.schedule.warmup_steps == 0 and recipe.total_steps >= _LONG_RUN:
        yield (
            "schedule.warmup_steps=0: the first steps of random weights have the full learning rate "
            f"{recipe.optimizer.lr:g}."
        )


def _ramp(recipe: Recipe) -> Iterator[str]:
    stages, steps = recipe.batch.ramp, recipe.total_steps
    if stages and steps <= sum(count for count, _ in recipe.batches.ramp):
        reached = len(recipe.batches.in_steps(steps))
        yield (
            f"batch.ramp: the run ends at step {steps}, in stage {reached} of {len(stages)}; "
            f"batch.global_batch={recipe.batch.global_batch} is never reached."
        )


def _floor(recipe: Recipe) -> Iterator[str]:
    schedule = recipe.schedule
    if schedule.kind != "constant" and schedule.min_ratio > 0.5:
        yield f"schedule.min_ratio={schedule.min_ratio:g}: the learning rate hardly falls."


def _horizon(recipe: Recipe) -> Iterator[str]:
    horizon, steps = recipe.horizon_steps, recipe.schedule_steps
    if recipe.schedule.kind != "constant" and horizon < steps / 2:
        rest = plural(steps - horizon, "step")
        yield f"schedule.horizon_steps={horizon:,}: the rest of the run, {rest}, is at the floor."


def _validation(recipe: Recipe) -> Iterator[str]:
    validation = recipe.data.validation
    if not validation.fraction and validation.path is None and not recipe.evaluation.sets:
        yield "data.validation.fraction=0: nothing is kept aside, and the run has no validation loss."


def _evaluation(recipe: Recipe) -> Iterator[str]:
    every, sequences = recipe.evaluation.every_steps, recipe.evaluation.sequences
    if every is None or sequences is None or every >= recipe.total_steps:
        return
    # In sequences of training steps, each of which takes three times as long.
    evaluated = sequences / _STEPS_PER_EVALUATION
    share = evaluated / (evaluated + every * recipe.batch.global_batch)
    if share > _EVALUATION_SHARE:
        yield (
            f"evaluation.every_steps={every}: evaluating {plural(sequences, 'sequence')} that often takes about "
            f"{share:.0%} of the time."
        )


def _logging(recipe: Recipe) -> Iterator[str]:
    every, steps = recipe.training.log_every, recipe.total_steps
    if every > steps >= _LOGGED_RUN:
        yield f"training.log_every={every}: the run has {steps} steps, so no line of metrics is written on the way."


def _average(recipe: Recipe) -> Iterator[str]:
    ema, steps = recipe.training.ema, recipe.total_steps
    if ema is None:
        return
    updates = max(0, steps - ema.start_step) // ema.every_steps
    if ema.start_step >= steps:
        yield f"training.ema.start_step={ema.start_step}: the run ends at step {steps}, before the average begins."
    # 1 / (1 - decay) updates is the span over which the weights of an exponential average fall to 1 / e.
    elif 1 / (1 - ema.decay) > updates:
        yield (
            f"training.ema.decay={ema.decay:g}: it averages about {1 / (1 - ema.decay):,.0f} updates, and the run has "
            f"{updates:,}: most of the average are the weights that it began with."
        )


def _idle(recipe: Recipe) -> Iterator[str]:
    micro, length = recipe.batch.micro_batch, recipe.data.sequence_length
    passes = recipe.batch.global_batch // micro
    if micro * length < _FEW_TOKENS and passes >= 4:
        yield (
            f"batch.micro_batch={micro}: a pass of {micro * length:,} tokens leaves the device idle most of the time, "
            f"and a step needs {passes:,} of them."
        )


def _initial_weights(recipe: Recipe) -> Iterator[str]:
    std = recipe.model.init_std
    if std > 0.2 or std < 1e-4:
        yield f"model.init_std={std:g}: activations of the first steps are {'large' if std > 0.2 else 'near zero'}."


ODD_VALUES: tuple[OddValue, ...] = (
    OddValue("learning-rate", _learning_rate, "Usual are 1e-4 for the largest models to 3e-3 for the smallest."),
    OddValue("betas", _betas, "Usual are 0.9 and 0.95, or 0.9 and 0.999."),
    OddValue("weight-decay", _weight_decay, "Usual are 0 to 0.2."),
    OddValue("epsilon", _epsilon, "Usual is 1e-8."),
    OddValue("clipping", _clipping, "Usual is 1, or null for no clipping."),
    OddValue("z-loss", _z_loss, "Usual are 0 to 1e-4."),
    OddValue("warm-up", _warmup, "Usual are 1 to 5 % of the run."),
    OddValue("no-warm-up", _no_warmup, "Usual are 1 to 5 % of the run."),
    OddValue("ramp", _ramp, ""),
    OddValue("floor", _floor, "Usual are 0 to 0.1."),
    OddValue("horizon", _horizon, "Usual is null, the end of the run."),
    OddValue("no-validation", _validation, "Usual is 0.01, or data.validation.path."),
    OddValue("evaluation", _evaluation, "Usual are a few percent: evaluate less often, or fewer sequences."),
    OddValue("logging", _logging, "Usual are 1 to 10."),
    OddValue("average", _average, "Usual is 1 - 1 / (a tenth of the run's updates)."),
    OddValue("idle-device", _idle, "Usual are thousands of tokens per pass, as many as fit into memory."),
    OddValue("initial-weights", _initial_weights, "Usual are 0.006 to 0.04."),
)
"""All rules, in the order of the recipe's sections."""
