"""Laws of loss that a plan asks: that of published runs, or that of a ladder of the user's own.

    PublishedLaw | LadderLaw, a LossLaw each: model, tokens --loss, flops--> nats per token, FLOPs
    FLOPs, tokens to generate --best_size, size_range--> BestSize, SizeRange
    model, tokens --forecast--> PlannedLoss: range, margin and distance from the ladder; None if published

The published law is C = 6 N D FLOPs, L(N, D) = E + A / N^alpha + B / D^beta: Hoffmann et al. 2022 (arXiv 2203.15556),
approach 3, with the constants of Besiroglu et al. 2024 (arXiv 2404.10102), since the published ones were rounded and
their fit had not converged. N counts all parameters. The runs had up to 16 billion parameters and MassiveText as data:
other data has another loss, but nearly the same best size. With tokens to be generated: Sardana et al. 2023 (arXiv
2401.00448), equation 2. They also find that far beyond the usual tokens per parameter, more tokens help less than the
law says.

A ladder may count sizes in another way, by which FLOPs are not proportional to them: a head takes FLOPs, and may not
count. So the best size is found among shapes, each with its own FLOPs and its size as the ladder counts it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, floor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hlat.config import ModelConfig, Recipe
from hlat.forecast import (
    CHINCHILLA,
    FLOPS_PER_PARAMETER,
    SIZE_WORDS,
    Ladder,
    LossRange,
    ScalingLaw,
    SizeKind,
    model_sizes,
    read_ladder,
)
from hlat.model import count_parameters, flops_per_token
from hlat.planner.problem.shapes import llama_class_shapes
from hlat.runtime.quantities import rounded_text, short_count, usd_text
from hlat.runtime.terminal import NAMED, listed, plural

WIDEST_SIZES = 2.0
"""Times its low end that a range of best sizes may have; beyond, the ladder chooses nothing."""

_TENTH = 0.1  # of a budget, whose worth is said
_DIGITS = 2  # of a margin, as many as it has


class BestSize(NamedTuple):
    """The size that a law wants, and its training tokens."""

    parameters: float  # all
    tokens: float
    loss: float  # in nats per token


class SizeRange(NamedTuple):
    """Parameters that 4 of 5 laws want that fit a ladder as well."""

    low: float
    high: float
    shapes: tuple[float, float]  # parameters of the smallest shape that hlat knows, and of the largest

    @property
    def at_edge(self) -> bool:
        """True if some want less than the smallest shape, or more than the largest."""
        return self.low <= self.shapes[0] or self.high >= self.shapes[1]

    @property
    def is_determined(self) -> bool:
        return not self.at_edge and self.high <= WIDEST_SIZES * self.low

    def __str__(self) -> str:
        return f"{short_count(self.low)} to {short_count(self.high)}{' or beyond' * self.at_edge}"


@dataclass(frozen=True)
class Margin:
    """Changes of the loss by a tenth more of a budget, or less, in nats per token."""

    tokens: float  # if it is spent on tokens
    size: float | None  # if it is spent on a larger model; None if no layers are left that a smaller one could lose

    def words(self, tokens: str, size: str) -> str:
        """The better of the two first."""
        both = sorted([(self.tokens, tokens)] + ([] if self.size is None else [(self.size, size)]))
        return ", ".join(f"{change:+.{_DIGITS}g} in {what}" for change, what in both)


@dataclass(frozen=True)
class PlannedLoss:
    """Loss at the end of a planned run, by a ladder."""

    ladder: str  # its folder, and how many runs it has
    id: str
    range: LossRange
    beyond: float  # FLOPs over those of the ladder's largest run
    more: Margin
    less: Margin
    warnings: tuple[str, ...]
    tasks: Mapping[str, tuple[float, float, float]]  # accuracy, and its range in 4 of 5 runs

    @property
    def span(self) -> str:
        """Range of 4 of 5 runs, as a narrow column shows it: rounded to both sides."""
        return f"{floor(100 * self.range.low) / 100:.2f}-{ceil(100 * self.range.high) / 100:.2f}"

    def __str__(self) -> str:
        return f"{self.range.loss:.3f}, {self.range.low:.3f} to {self.range.high:.3f}"

    def facts(self, usd: float | None) -> Iterator[tuple[str, str]]:
        """Yield subjects and sentences; ``usd`` is the cost of the run, if it is known."""
        far = f"{rounded_text(self.beyond, 2)} times the FLOPs of the largest of them"
        yield "loss", f"{self} in 4 of 5 runs, by {self.ladder}; this run has {far}"
        more, less = self.more.words("more tokens", "a larger model"), self.less.words("fewer tokens", "a smaller one")
        tenth = "" if usd is None else f" ({usd_text(_TENTH * usd, 2)})"
        yield "margin", f"loss for a tenth more budget{tenth}: {more}; for a tenth less: {less}"
        if self.tasks:
            each = [f"{task} {value:.2f}, {low:.2f} to {high:.2f}" for task, (value, low, high) in self.tasks.items()]
            yield "tasks", f"accuracy in 4 of 5 runs: {listed(each, NAMED, '; ')}"
        yield from (("ladder", warning) for warning in self.warnings)

    def to_dict(self) -> dict[str, Any]:
        """The forecast under its documented keys (docs/planning.md), as JSON values."""
        return {
            "ladder": self.id,
            "loss": self.range.loss,
            "loss_interval": [self.range.low, self.range.high],
            "flops_over_ladder": self.beyond,
            "tenth_more_budget": {"tokens": self.more.tokens, "size": self.more.size},
            "tenth_less_budget": {"tokens": self.less.tokens, "size": self.less.size},
            "warnings": list(self.warnings),
            "tasks": {
                task: {"accuracy": value, "accuracy_interval": interval}
                for task, (value, *interval) in self.tasks.items()
            },
        }


def forecast_json(loss: PlannedLoss | None) -> dict[str, Any]:
    """Return the entry of a forecast in the JSON of a plan; empty without a ladder."""
    return {} if loss is None else {"forecast": loss.to_dict()}


@dataclass(frozen=True)
class PublishedLaw:
    """The law of Hoffmann et al., by all parameters."""

    source = "law: Hoffmann 2022, approach 3, constants of Besiroglu 2024; D tokens, N parameters, all counted"

    def flops(self, model: ModelConfig, sequence: int, tokens: float) -> float:
        """Count the FLOPs of training."""
        return FLOPS_PER_PARAMETER * count_parameters(model).total * tokens

    def loss(self, model: ModelConfig, sequence: int, tokens: int) -> float:
        """Return the loss in nats per token."""
        return CHINCHILLA.loss(count_parameters(model).total, tokens)

    def best_size(self, flops: float, generated: float, sequence: int) -> BestSize:
        """Return the best size for FLOPs of training and tokens to generate, as ``ScalingLaw.optimal_size`` does."""
        best = CHINCHILLA.optimal_size(flops, generated)
        return BestSize(*best, CHINCHILLA.loss(*best))

    def size_range(self, flops: float, generated: float, sequence: int) -> SizeRange | None:
        """Return how far the best size is known: nobody says."""
        return None

    def forecast(
        self, model: ModelConfig, sequence: int, tokens: int, batch: int, recipe: Recipe | None
    ) -> PlannedLoss | None:
        """Forecast the loss of a run on the user's own data, of which this law knows nothing."""
        return None


@dataclass(frozen=True)
class LadderLaw:
    """The law that a ladder's runs give, by the size that it counts; FLOPs as they are, attention included."""

    ladder: Ladder
    folder: Path

    @classmethod
    def read(cls, folder: Path) -> "LadderLaw":
        """Read and fit a ladder; PlanError if there is none, or its runs determine no law."""
        ladder = read_ladder(folder)
        _ = ladder.fit  # wrong runs are said before anything is planned
        return cls(ladder, folder)

    @cached_property
    def name(self) -> str:
        return f"{plural(len(self.ladder.runs), 'run')} of {self.folder}"

    @property
    def source(self) -> str:
        return f"law: {self.name}, sizes by {SIZE_WORDS[self.ladder.kind]}; D tokens, N all parameters"

    def flops(self, model: ModelConfig, sequence: int, tokens: float) -> float:
        return flops_per_token(model, sequence) * tokens

    def loss(self, model: ModelConfig, sequence: int, tokens: int) -> float:
        return self.ladder.forecast(model_sizes(model, sequence), tokens).end.loss

    def best_size(self, flops: float, generated: float, sequence: int) -> BestSize:
        shapes, law = _counted_shapes(self.ladder.kind, sequence), self.ladder.fit.law
        best = _best(law, shapes, flops, generated)
        tokens = float(flops / shapes.flops[best])
        return BestSize(float(shapes.parameters[best]), tokens, law.loss(float(shapes.sizes[best]), tokens))

    def size_range(self, flops: float, generated: float, sequence: int) -> SizeRange:
        shapes = _counted_shapes(self.ladder.kind, sequence)
        wanted = [shapes.parameters[_best(law, shapes, flops, generated)] for law in self.ladder.fit.samples]
        low, high = map(float, np.quantile(wanted, (0.1, 0.9)))
        return SizeRange(low, high, (float(shapes.parameters[0]), float(shapes.parameters[-1])))

    def forecast(
        self, model: ModelConfig, sequence: int, tokens: int, batch: int, recipe: Recipe | None
    ) -> PlannedLoss:
        # ``batch`` is the tokens of a step; ``recipe`` is the run's own, as it is planned, if it has one.
        sizes, unlike = model_sizes(model, sequence), list(self._unlike(model, sequence, batch, recipe))
        forecast = self.ladder.forecast(sizes, tokens)
        largest = max(run.sizes["flops"] * run.tokens for run in self.ladder.runs)
        return PlannedLoss(
            self.name,
            self.ladder.id,
            forecast.end,
            sizes["flops"] * tokens / largest,
            self.margin(sizes, tokens, _TENTH),
            self.margin(sizes, tokens, -_TENTH),
            (*forecast.warnings, *([f"{listed(unlike)}: its law may not hold"] if unlike else [])),
            forecast.tasks,
        )

    def margin(self, sizes: Mapping[SizeKind, float], tokens: float, share: float) -> Margin:
        """Return what a share more of the FLOPs changes."""
        law, size = self.ladder.fit.law, sizes[self.ladder.kind]
        here = law.loss(size, tokens)
        # More layers add as many parameters, however they are counted, as they add FLOPs over 6. A head may take more
        # FLOPs than all layers.
        larger = size + share * sizes["flops"]
        by_size = law.loss(larger, tokens) - here if larger > 0 else None
        return Margin(law.loss(size, (1 + share) * tokens) - here, by_size)

    def _unlike(self, model: ModelConfig, sequence: int, batch: int, recipe: Recipe | None) -> Iterator[str]:
        """Yield in which conditions a run differs from the ladder; PlanError if its losses cannot be compared."""
        if recipe is not None:
            yield from self.ladder.unlike(recipe)
            return
        # Without a recipe, a plan knows its model, sequences and batch alone.
        said = {"data.sequence_length": sequence, "batch.tokens": batch}
        said |= {f"model.{name}": value for name, value in model.model_dump(mode="json").items()}
        for path, value in said.items():
            if (known := self.ladder.conditions.get(path, value)) != value:
                yield f"{path} is {value}, and {known} in the ladder"


PUBLISHED = PublishedLaw()
LossLaw = PublishedLaw | LadderLaw

Vector = NDArray[np.float64]


class _CountedShapes(NamedTuple):
    """Shapes, the smallest first."""

    parameters: Vector  # all
    sizes: Vector  # as a law counts them
    flops: Vector  # of training, per token


@lru_cache(maxsize=4)
def _counted_shapes(kind: SizeKind, sequence: int) -> _CountedShapes:
    models = [ModelConfig.model_validate(section) for _, section in llama_class_shapes()]
    counts = [model_sizes(model, sequence) for model in models]
    total, sizes, flops = (np.array([count[name] for count in counts]) for name in ("total", kind, "flops"))
    return _CountedShapes(total, sizes, FLOPS_PER_PARAMETER * flops)


def _best(law: ScalingLaw, shapes: _CountedShapes, flops: float, generated: float) -> int:
    """Return the place of the shape that no other of its loss beats in FLOPs of training and generating."""
    by_size = law.irreducible + law.a / shapes.sizes**law.alpha
    losses = by_size + law.b / (flops / shapes.flops) ** law.beta
    if not generated:
        return int(np.argmin(losses))
    # Rows are shapes, each with its loss; columns are shapes trained to that loss, some of which never get there.
    left = losses[:, None] - by_size
    with np.errstate(divide="ignore", invalid="ignore"):
        needed = np.where(left > 0, (law.b / left) ** (1 / law.beta), np.inf)
    # Generating takes a third of the FLOPs of training.
    lifetime = (shapes.flops * (needed + generated / 3)).min(axis=1)
    return int(np.argmin((flops + shapes.flops * generated / 3) / lifetime))
