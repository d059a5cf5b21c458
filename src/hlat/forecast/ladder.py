"""A ladder: small runs of a recipe, the law that they give, and the loss that it forecasts for a larger run.

    runs/NAME-ladder/ladder.json  <--write_ladder--  Ladder: runs, conditions  --read_ladder-->
    Ladder.fit --> LawFit        recipe --sizes_of--> Sizes
    Ladder.forecast(sizes, tokens) --> Forecast: loss over the tokens of the run, accuracies of tasks, with their ranges

The schedule's shape decides how the loss falls within a run. So a curve is that of the ladder's own runs: at each
fraction of a run's tokens, the ratio of its loss to its last one, as a function of size and tokens.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hlat.config import ModelConfig, Recipe, short
from hlat.forecast.conditions import differences
from hlat.forecast.design import FAR, FEW_TOKENS, WIDEST_RANGE, NextRun, above_irreducible, best_next_run, check_design
from hlat.forecast.fitting import LawFit, LossRange, Observation, around, fit_range
from hlat.forecast.law import FLOPS_PER_PARAMETER
from hlat.forecast.shapes import RunCurve, fit_shapes
from hlat.forecast.tasks import TaskFit, fit_tasks
from hlat.model import count_parameters, flops_per_token
from hlat.runtime.errors import PlanError
from hlat.runtime.storage.local_files import read_small_file, write_atomic
from hlat.runtime.terminal import NAMED, listed

LADDER_FILE = "ladder.json"

Vector = NDArray[np.float64]
SizeKind = Literal["total", "non_embedding", "flops"]
"""Ways to count the size of a model."""
SIZE_WORDS: dict[SizeKind, str] = {
    "total": "all parameters",
    "non_embedding": "parameters but embedding and head",
    "flops": "FLOPs per token / 6",
}


_LEAST_ERROR = 1e-4  # of log(loss)
_ALIKE = 4  # errors of left-out runs are alike: more of them do not say more
_KINDS: tuple[SizeKind, ...] = ("flops", "non_embedding", "total")  # that of equal forecasts is the first


@dataclass(frozen=True)
class LadderRun:
    """A finished run of a ladder."""

    name: str
    sizes: Mapping[SizeKind, float]
    tokens: int
    loss: float  # of validation, at its end, in nats per token
    curve: tuple[tuple[float, float], ...]  # validations: fraction of the run's tokens, loss; the last is the end
    trunk: str = ""  # the same for runs that share noise: those of one size and seed
    scores: Mapping[str, float] = field(default_factory=dict)  # of tasks at its end: TASK/acc, TASK/bits_per_byte


@dataclass(frozen=True)
class Forecast:
    """Loss that a run is expected to have, at its end and on the way there."""

    ladder: str  # id
    tokens: int
    end: LossRange
    curve: tuple[tuple[float, LossRange], ...]  # fraction of the run's tokens, loss; rising fractions, the last is 1
    sizes: Mapping[SizeKind, float] = field(default_factory=dict)
    kind: SizeKind = "flops"  # the one of ``sizes`` that the law used
    warnings: tuple[str, ...] = ()
    written: str = ""  # when it was registered, ISO 8601
    tasks: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)  # accuracy, low and high of 4 of 5

    @property
    def words(self) -> str:
        """Loss at the end with its range, and the ladder."""
        end = self.end
        range_ = f"{end.low:.3f} to {end.high:.3f} in 4 of 5 runs"
        return f"validation loss {end.loss:.3f} at the end, {range_}, by ladder {self.ladder}"


@dataclass(frozen=True)
class Ladder:
    """Runs of a ladder, and what a run must share with them for their law to hold."""

    runs: tuple[LadderRun, ...]
    conditions: Mapping[str, Any]  # see ``conditions_of``

    @cached_property
    def id(self) -> str:
        """Hash of runs and conditions: two ladders with the same id forecast the same."""
        text = json.dumps([[_values(run) for run in self.runs], dict(self.conditions)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def kind(self) -> SizeKind:
        """Count of sizes that the law uses: the one by which the smaller runs forecast the larger ones best."""
        return min(self._fits, key=lambda kind: self._fits[kind].error)

    @property
    def fit(self) -> LawFit:
        """The law; PlanError if the runs do not determine it."""
        return self._fits[self.kind]

    @cached_property
    def _fits(self) -> dict[SizeKind, LawFit]:
        kinds = [kind for kind in _KINDS if all(kind in run.sizes for run in self.runs)]
        for kind in kinds:
            check_design(self._observations(kind))
        return {kind: fit_range(self._observations(kind)) for kind in kinds}

    @cached_property
    def _task_fits(self) -> tuple[dict[str, TaskFit], list[str]]:
        return fit_tasks([(run.loss, run.scores) for run in self.runs])

    def _observations(self, kind: SizeKind) -> list[Observation]:
        return [Observation(run.sizes[kind], run.tokens, run.loss, run.trunk) for run in self.runs]

    def _drawn(self, sizes: Mapping[SizeKind, float], tokens: float) -> Vector:
        """Return losses that a run may have, by all counts of sizes: each has its share as the runs speak for it."""
        # Likelihood of the errors of the left-out forecasts, whose common noise is not known.
        scores = {k: (fit.error + _LEAST_ERROR) ** -min(fit.left_out, _ALIKE) for k, fit in self._fits.items()}
        drawn = [self._fits[kind].drawn(sizes[kind], tokens) for kind in scores]
        shares = [score / sum(scores.values()) for score in scores.values()]
        return np.concatenate([each[: round(len(each) * share)] for each, share in zip(drawn, shares, strict=True)])

    def forecast(self, sizes: Mapping[SizeKind, float], tokens: int) -> Forecast:
        """Forecast a run of some size and tokens.

        PlanError: the runs determine no law, or the range is so wide that it says nothing (``WIDEST_RANGE``).
        """
        kind, law = self.kind, self.fit.law
        drawn = self._drawn(sizes, tokens)
        end = around(law.loss(sizes[kind], tokens), drawn)
        if (ratio := above_irreducible(end, law.irreducible)) > WIDEST_RANGE:
            more = self.next_run(sizes, tokens)
            apart = "without bound" if math.isinf(ratio) else f"by a factor of {ratio:.1f}"
            raise PlanError(
                f"The forecast is too uncertain to be of use: {end.low:.2f} to {end.high:.2f} in 4 of 5 cases, where "
                f"{law.irreducible:.2f} is irreducible. Above that, the ends differ {apart}, and "
                f"{WIDEST_RANGE:g} is the largest factor that is given. A run with N = {more.size:.3g} "
                f"({SIZE_WORDS[kind]}) on {more.tokens:.3g} tokens would make the range about "
                f"{1 - more.narrowing:.0%} narrower."
            )
        fits, without = self._task_fits
        tasks = {task: fit.accuracy(end.loss, drawn) for task, fit in fits.items()}
        return Forecast(self.id, tokens, end, self._curve(end, drawn, sizes[kind], tokens), dict(sizes), kind,
                        (*self._warnings(sizes, tokens), *without), tasks=tasks)  # fmt: skip

    def forecast_recipe(self, recipe: Recipe) -> Forecast:
        """Forecast the run of a recipe, with a warning for each field in which it differs from the ladder.

        PlanError: as ``forecast``; or losses of the recipe cannot be compared with those of the ladder.
        """
        lines = self.unlike(recipe)
        forecast = self.forecast(sizes_of(recipe), recipe.total_tokens)
        other = [f"the ladder differs, and the loss may: {listed(lines, NAMED, '; ')}"] if lines else []
        return replace(forecast, warnings=(*forecast.warnings, *other))

    def unlike(self, recipe: Recipe) -> list[str]:
        """Say in which fields a recipe differs from the ladder; PlanError if their losses cannot be compared."""
        found = differences(self.conditions, recipe)
        lines = [f"{one.field} is {short(one.recipe)}, and {short(one.ladder)} in the ladder" for one in found]
        if wrong := [line for line, one in zip(lines, found, strict=True) if one.incomparable]:
            raise PlanError(
                "The ladder says nothing of this run, since its losses measure something else: "
                f"{listed(wrong, NAMED, '; ')}. Make a ladder of this recipe with hlat ladder, or do without a "
                "forecast. The same text must have the same file names."
            )
        return lines

    def next_run(
        self,
        sizes: Mapping[SizeKind, float],
        tokens: float,
        candidates: Sequence[tuple[Mapping[SizeKind, float], float]] = (),
    ) -> NextRun:
        """Return the further run that would narrow the range of a target most for its cost; see ``best_next_run``."""
        pairs = [(size[self.kind], count) for size, count in candidates]
        return best_next_run(self.fit, self._observations(self.kind), (sizes[self.kind], tokens), pairs)

    def _curve(self, end: LossRange, drawn: Vector, size: float, tokens: float) -> tuple[tuple[float, LossRange], ...]:
        shapes = fit_shapes([RunCurve(run.sizes[self.kind], run.tokens, run.curve) for run in self.runs], size, tokens)
        own = np.random.default_rng(1).normal(size=len(drawn))
        rows = [around(end.loss * np.exp(one.ratio), drawn * np.exp(one.ratio + one.spread * own)) for one in shapes]
        # A loss falls. Where validations are few, interpolation may have it rise.
        falling = np.maximum.accumulate(np.array([end, *reversed(rows)]), axis=0)[::-1]
        fractions = [one.fraction for one in shapes] + [1.0]
        return tuple((one, LossRange(*row)) for one, row in zip(fractions, falling.tolist(), strict=True))

    def _warnings(self, sizes: Mapping[SizeKind, float], tokens: float) -> Iterator[str]:
        kind = next(iter(self._fits))  # FLOPs, where they were counted
        beyond = sizes[kind] * tokens / max(run.sizes[kind] * run.tokens for run in self.runs)
        if beyond > FAR:
            yield (
                f"the run takes {beyond:,.0f} times the FLOPs of the ladder's largest run; above {FAR:g} times, few "
                "published ladders have tested such ranges"
            )
        own, least = tokens / sizes[kind], min(run.tokens / run.sizes[kind] for run in self.runs)
        if own * FEW_TOKENS < least:
            yield (
                f"the run has {own:.2g} tokens per parameter, and runs of the ladder at least {least:.2g}; eleven "
                "such runs were forecast, 0.8 to 14 % off, and five ended outside of the range"
            )


def sizes_of(recipe: Recipe) -> dict[SizeKind, float]:
    """Count a recipe's model in every way."""
    return model_sizes(recipe.model, recipe.data.sequence_length)


def model_sizes(model: ModelConfig, sequence_length: int) -> dict[SizeKind, float]:
    """Count a model in every way."""
    counts = count_parameters(model)
    flops = flops_per_token(model, sequence_length) / FLOPS_PER_PARAMETER
    outside = counts.embedding + counts.head
    return {"total": counts.total, "non_embedding": counts.total - outside, "flops": flops}


def _values(run: LadderRun) -> dict[str, Any]:
    """Return a run as JSON values; ladders without tasks keep the id that they had before runs had scores."""
    return {name: value for name, value in asdict(run).items() if name != "scores" or value}


def write_ladder(folder: Path, ladder: Ladder) -> None:
    """Write the runs of a ladder into its folder."""
    runs = [_values(run) for run in ladder.runs]
    content = {"version": 1, "id": ladder.id, "runs": runs, "conditions": dict(ladder.conditions)}
    write_atomic(folder / LADDER_FILE, json.dumps(content, indent=1, allow_nan=False).encode())


def read_ladder(folder: Path) -> Ladder:
    """Read a ladder; PlanError if there is none, or it cannot be read."""
    try:
        content = json.loads(read_small_file(folder / LADDER_FILE, kind="the record of a ladder"))
        runs = [{**run, "curve": tuple(map(tuple, run["curve"]))} for run in content["runs"]]
        ladder = Ladder(tuple(LadderRun(**run) for run in runs), content["conditions"])
        if content["id"] != ladder.id:
            raise ValueError("its id is not that of its content, so it was edited")
        return ladder
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise PlanError(f"{folder}: no ladder can be read there ({reason}). Make one with hlat ladder.") from error
