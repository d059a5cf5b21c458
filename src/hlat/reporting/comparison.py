"""Several runs side by side: fields in which their recipes differ, losses at the same tokens, last numbers.

    RunOverview each -> RunComparison -> text of `hlat compare`, or JSON

Losses are compared at token counts that all runs have logged. Only if there are none, at those of the run that has
logged least, where the losses of the others are interpolated and marked. No run is compared beyond the tokens of the
shortest, and no value is repeated: two logged steps are two rows.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hlat.reporting.overview import Curve, RunOverview, flat_settings, read_overview

_PLACES = 8
_OWN = ("run.name", "run.dir")  # differ in any two runs


class LossesAt(NamedTuple):
    """Training losses of several runs after the same number of tokens.

    Attributes:
        tokens: trained tokens.
        losses: loss of each run.
        interpolated: for each run, True if it logged no loss there, so that it lies between two logged ones.
    """

    tokens: float
    losses: list[float]
    interpolated: list[bool]


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side.

    Attributes:
        runs: the runs.
        recipe: fields in which the recipes differ: the value in each run, None where a recipe lacks the field.
        curve: training losses at the same tokens; at most eight rows, the last one at the most tokens.
    """

    runs: tuple[RunOverview, ...]
    recipe: dict[str, list[str | None]]
    curve: list[LossesAt]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "runs": [{**run.to_dict(), "loss": None, "recipe": None} for run in self.runs],
            "recipe": self.recipe,
            "curve": [
                {"tokens": each.tokens, "loss": each.losses, "interpolated": each.interpolated} for each in self.curve
            ],
        }


def compare_runs(folders: Sequence[Path]) -> RunComparison:
    """Compare runs.

    Raises:
        DataError: a folder is not that of a run.
        StorageError: a file cannot be read.
    """
    runs = tuple(read_overview(folder) for folder in folders)
    flat = [flat_settings(run.settings) for run in runs]
    fields = dict.fromkeys(field for settings in flat for field in settings if field not in _OWN)
    values = {field: [settings.get(field) for settings in flat] for field in fields}
    return RunComparison(
        runs,
        {field: found for field, found in values.items() if len(set(found)) > 1},
        _curve([run.loss for run in runs]),
    )


def _curve(curves: Sequence[Curve]) -> list[LossesAt]:
    """Return the losses at some numbers of tokens that all runs have reached."""
    if not curves or not all(curves):
        return []
    common = set(curves[0].tokens)
    for curve in curves[1:]:
        common = {tokens for tokens in curve.tokens if tokens in common}
    places = _some(sorted(common) or _fewest_places(curves))
    found = [[_at(curve, tokens) for curve in curves] for tokens in places]
    return [
        LossesAt(tokens, [loss for loss, _ in each], [is_interpolated for _, is_interpolated in each])
        for tokens, each in zip(places, found, strict=True)
    ]


def _fewest_places(curves: Sequence[Curve]) -> list[float]:
    """Return the tokens within the range of all runs at which the run has logged that has logged least there."""
    first, last = max(curve.tokens[0] for curve in curves), min(curve.tokens[-1] for curve in curves)
    ranges = [[tokens for tokens in curve.tokens if first <= tokens <= last] for curve in curves]
    return min((each for each in ranges if each), key=len, default=[])


def _some(places: Sequence[float]) -> list[float]:
    """Return at most eight values, evenly spread, the last one included."""
    count = min(_PLACES, len(places))
    return [places[len(places) * (number + 1) // count - 1] for number in range(count)]


def _at(curve: Curve, tokens: float) -> tuple[float, bool]:
    """Return the loss that was logged there, else one interpolated linearly and True; a curve's ends go on as are."""
    index = bisect_left(curve.tokens, tokens)
    if index == len(curve):
        return curve.losses[-1], True
    (x1, y1), (x0, y0) = curve[index], curve[max(0, index - 1)]
    if x1 == tokens or x1 <= x0:
        return y1, x1 != tokens
    return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0), True
