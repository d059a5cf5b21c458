"""A ladder: small runs of a recipe, the law that they give, and the loss that it forecasts for a larger run.

    runs/NAME-ladder/ladder.json  <--write_ladder--  Ladder: runs, conditions  --read_ladder-->
    Ladder.fit --> LawFit        recipe --sizes_of--> Sizes, --conditions_of--> what two runs must share to be compared
    Ladder.forecast(sizes, tokens) --> Forecast: loss over the tokens of the run, with its range

The schedule's shape decides how the loss falls within a run. So a curve is that of the ladder's own runs: at each
fraction of a run's tokens, the ratio of its loss to its last one, as a function of size and tokens.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hlat.config import Recipe
from hlat.forecast.fitting import LawFit, LossRange, Observation, fit_range
from hlat.forecast.law import FLOPS_PER_PARAMETER
from hlat.model import count_parameters, flops_per_token
from hlat.runtime.errors import PlanError
from hlat.runtime.storage.local_files import read_small_file, write_atomic

LADDER_FILE = "ladder.json"

SizeKind = Literal["total", "non_embedding", "flops"]
"""Ways to count the size of a model: all parameters; those beyond embedding and head; FLOPs per token, over 6."""


@dataclass(frozen=True)
class LadderRun:
    """A finished run of a ladder."""

    name: str
    sizes: Mapping[SizeKind, float]
    tokens: int
    loss: float  # of validation, at its end, in nats per token
    curve: tuple[tuple[float, float], ...]  # validations: fraction of the run's tokens, loss; the last is the end


@dataclass(frozen=True)
class Forecast:
    """Loss that a run is expected to have, at its end and on the way there."""

    ladder: str  # id
    tokens: int
    end: LossRange
    curve: tuple[tuple[float, LossRange], ...]  # fraction of the run's tokens, loss; rising fractions, the last is 1
    sizes: Mapping[SizeKind, float] = field(default_factory=dict)
    kind: SizeKind = "flops"  # the one of ``sizes`` that the law used
    written: str = ""  # when it was registered, ISO 8601


@dataclass(frozen=True)
class Ladder:
    """Runs of a ladder, and what a run must share with them for their law to hold."""

    runs: tuple[LadderRun, ...]
    conditions: Mapping[str, Any]  # see ``conditions_of``

    @property
    def id(self) -> str:
        """Hash of runs and conditions: two ladders with the same id forecast the same."""
        text = json.dumps([[asdict(run) for run in self.runs], dict(self.conditions)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def kind(self) -> SizeKind:
        """Count of sizes that the law uses."""
        return "flops"

    @cached_property
    def fit(self) -> LawFit:
        """The law; PlanError if the runs do not determine it."""
        return fit_range([Observation(run.sizes[self.kind], run.tokens, run.loss) for run in self.runs])

    def forecast(self, sizes: Mapping[SizeKind, float], tokens: int) -> Forecast:
        """Forecast a run of some size and tokens; PlanError if the ladder cannot."""
        end = self.fit.loss(sizes[self.kind], tokens)
        return Forecast(self.id, tokens, end, ((1.0, end),), dict(sizes), self.kind)


def sizes_of(recipe: Recipe) -> dict[SizeKind, float]:
    """Count a recipe's model in every way."""
    counts = count_parameters(recipe.model)
    flops = flops_per_token(recipe.model, recipe.data.sequence_length) / FLOPS_PER_PARAMETER
    outside = counts.embedding + counts.head
    return {"total": counts.total, "non_embedding": counts.total - outside, "flops": flops}


def conditions_of(recipe: Recipe) -> dict[str, Any]:
    """Return the fields, by dotted path, in which a run must agree with a ladder for its law to hold."""
    return {"data.sequence_length": recipe.data.sequence_length}


def write_ladder(folder: Path, ladder: Ladder) -> None:
    """Write the runs of a ladder into its folder."""
    content = {"version": 1, "id": ladder.id, **asdict(ladder)}
    write_atomic(folder / LADDER_FILE, json.dumps(content, indent=1, allow_nan=False).encode())


def read_ladder(folder: Path) -> Ladder:
    """Read a ladder; PlanError if there is none, or it cannot be read."""
    try:
        content = json.loads(read_small_file(folder / LADDER_FILE, kind="the record of a ladder"))
        runs = [{**run, "curve": tuple(map(tuple, run["curve"]))} for run in content["runs"]]
        return Ladder(tuple(LadderRun(**run) for run in runs), content["conditions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{folder}: no ladder can be read there ({error}). Make one with hlat ladder.") from error
