"""The runs of one size of a ladder: the recipe with the sizes of a smaller model, and its schedule scaled in time.

    Target, Shape, tokens per parameter --runs_of_size--> PlannedRuns, each an ``hlat train`` with overrides, or a fork

With the schedule wsd, a longer run goes on from the last step of the shorter one before its decay:

    run 1  warm-up, peak rate ......... | decay
    run 2                               | peak rate .................. | decay

It has the bits of a run that was trained alone: up to there both had the same rates. Other schedules fall from the
first step on, and each of their runs is trained alone.

All sizes have the seed of the recipe. The cheapest run is repeated with others, for the noise that seeds make.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from hlat.config import Recipe
from hlat.forecast import conditions_of
from hlat.ladder.shapes import Shape
from hlat.model import flops_per_token
from hlat.planner import peak_rate

_VALIDATIONS, _LEAST_VALIDATIONS, _SAVES = 20, 5, 2  # of a run, on its way
_LEAST_WARMUP = 0.02  # of a run: the share of a long target is too few steps of a short run
_REPEATS = 4  # of the cheapest run
_VALIDATION_SHARE = 0.25  # of the FLOPs of training, above which a run validates less often


@dataclass(frozen=True)
class Target:
    """The recipe that a ladder is for."""

    recipe: Recipe  # with every value that its run would choose
    source: str  # file, or the name of a shipped recipe
    words: tuple[str, ...]  # overrides
    chosen: frozenset[str] = frozenset()  # fields of these values: they depend on the length of the run
    validation_tokens: int | None = None  # of one validation; None if the text is not prepared yet

    @property
    def chooses_rates(self) -> bool:
        """True if each size has a peak rate of its own; a transfer rule scales one rate itself."""
        return "optimizer.lr" in self.chosen and getattr(self.recipe.optimizer, "transfer", "none") == "none"

    @property
    def conditions(self) -> dict[str, Any]:
        """Settings that another run must share with the ladder, without rates that each size chose."""
        found = conditions_of(self.recipe)
        if self.chooses_rates:
            del found["optimizer.lr"]
        return found


@dataclass(frozen=True)
class PlannedRun:
    """A run of a ladder, as it will be started."""

    name: str  # of its folder: width x layers - steps, and its seed if that is not the recipe's
    parameters: int
    tokens: int
    steps: int
    flops: float  # per token
    overrides: tuple[str, ...]  # of the recipe; with a parent, of the parent's recipe
    validated_tokens: int = 0  # in all validations that it does itself; 0 if the text is not prepared yet
    parent: str | None = None  # run of the same size from whose checkpoint it goes on
    first: int = 0  # step of that checkpoint
    seconds: float | None = None  # expected, of what it does itself
    outside: float = 0.0  # of these, before and after what its record shows: Python, imports, text, the model
    seed: int | None = None  # None: the recipe's

    @property
    def size(self) -> str:
        """Width x layers."""
        return self.name.partition("-")[0]

    @property
    def own_tokens(self) -> float:
        """Tokens of the steps that it does itself."""
        return self.tokens * (1 - self.first / self.steps)

    @property
    def own_flops(self) -> float:
        """FLOPs of what it does itself: a validation is forward only, a third of training."""
        return self.flops * (self.own_tokens + self.validated_tokens / 3)


def runs_of_size(target: Target, shape: Shape, ratios: Sequence[float]) -> list[PlannedRun]:
    """Return the runs of a size, one for each number of tokens per parameter, the shortest first."""
    recipe = target.recipe
    lengths = sorted({ceil(ratio * shape.parameters / recipe.tokens_per_step) for ratio in ratios})
    fields = _common_fields(target, shape, lengths)
    flops = flops_per_token(shape.of(recipe.model), recipe.data.sequence_length)
    runs = list[PlannedRun]()
    for steps in lengths:
        name = f"{shape.name}-{steps}"
        before = runs[-1] if runs and has_trunk(recipe) else None
        first = 0 if before is None else before_decay(recipe, before.steps)
        own = _length_fields(target, steps)
        if before is None:
            own |= {**fields, "schedule.warmup_steps": _warmup(recipe, lengths, steps)}
        every = _validation_interval(target, steps)
        validated = (ceil(steps / every) - first // every) * (target.validation_tokens or 0)
        words = tuple(f"{path}={json.dumps(value)}" for path, value in own.items())
        parent = None if before is None else before.name
        tokens = steps * recipe.tokens_per_step
        runs.append(PlannedRun(name, shape.parameters, tokens, steps, flops, words, validated, parent, first))
    return runs


def repeated(target: Target, run: PlannedRun) -> list[PlannedRun]:
    """Return a run again, with each of four other seeds."""
    seeds = ((target.recipe.training.seed + more) % 2**63 for more in range(1, _REPEATS + 1))
    return [
        replace(run, name=f"{run.name}-seed{seed}", overrides=(*run.overrides, f"training.seed={seed}"), seed=seed)
        for seed in seeds
    ]


def places(target: Target, folder: Path, name: str) -> tuple[str, ...]:
    """Return the overrides that put a run into the ladder's folder as it is now, with the text that all runs share."""
    # A folder may be moved or copied: designs and recipes of runs have the place where it was.
    data = target.recipe.data.prepared_dir or str(folder / "data")
    return (f"run.dir={json.dumps(str(folder / name))}", f"data.prepared_dir={json.dumps(data)}")


def has_trunk(recipe: Recipe) -> bool:
    """Return True if runs of different lengths have the same rates up to their decays."""
    return recipe.schedule.kind == "wsd" and recipe.schedule.horizon_steps is None


def before_decay(recipe: Recipe, steps: int) -> int:
    """Return the last step of a wsd run of that length that has the peak rate."""
    return steps - max(1, round(recipe.schedule.decay_fraction * steps))


def _common_fields(target: Target, shape: Shape, lengths: Sequence[int]) -> dict[str, Any]:
    """Return the fields that all runs of a size share."""
    recipe = target.recipe
    rate = recipe.optimizer.lr
    if target.chooses_rates:
        # One for all lengths, of which a wsd run has several.
        tokens = sqrt(lengths[0] * lengths[-1]) * recipe.tokens_per_step
        per_token = flops_per_token(shape.of(recipe.model), recipe.data.sequence_length)
        rate = peak_rate(per_token * tokens, tokens, trained=False)
    return {
        **{f"model.{name}": value for name, value in shape.fields.items()},
        "batch.global_batch": recipe.batch.global_batch,
        "optimizer.lr": rate,
        # A small model needs neither the target's layout nor its recomputation.
        "parallel": {},
        "memory": {},
        "training.tokens": None,
        "training.stop_after": None,
        "run.ladder": None,  # it is about the target
    }


def _validation_interval(target: Target, steps: int) -> int:
    """Return the steps between two validations, which are forward only: a third of the FLOPs of training."""
    tokens = steps * target.recipe.tokens_per_step
    affordable = _VALIDATION_SHARE * 3 * tokens / (target.validation_tokens or 1)
    return max(1, int(steps // min(_VALIDATIONS, max(_LEAST_VALIDATIONS, affordable))))


def _length_fields(target: Target, steps: int) -> dict[str, Any]:
    """Return the fields that depend on the length of a run."""
    recipe = target.recipe
    kept = before_decay(recipe, steps) if has_trunk(recipe) else steps
    # A save at the step from which a longer run goes on, and at equal parts of the way there.
    saves = max(count for count in range(1, _SAVES + 1) if kept % count == 0)
    # A small state is written faster than a helper process starts.
    checkpoint = {"every_steps": kept // saves, "keep_last": 2, "keep_every_steps": kept, "background": False}
    horizon = recipe.schedule.horizon_steps
    return {
        "training.steps": steps,
        # On the sequences of the target's own validations: other ones have another loss.
        "evaluation": {
            "every_steps": _validation_interval(target, steps),
            "sequences": recipe.evaluation.sequences,
            "tasks": [str(task) for task in recipe.evaluation.tasks],  # their accuracies are forecast, too
        },
        "checkpoint": checkpoint,
        **({} if horizon is None else {"schedule.horizon_steps": ceil(horizon * steps / recipe.total_steps)}),
    }


def _warmup(recipe: Recipe, lengths: Sequence[int], steps: int) -> int:
    """Return the steps of warm-up: the target's share of the run; with a trunk, one number for all of its runs."""
    if not recipe.schedule.warmup_steps:
        return 0
    share = max(_LEAST_WARMUP, recipe.schedule.warmup_steps / recipe.total_steps)
    if not has_trunk(recipe):
        return ceil(share * steps)
    return min(ceil(share * sqrt(lengths[0] * lengths[-1])), before_decay(recipe, lengths[0]) - 1)
