"""Several runs side by side: fields in which their recipes differ, losses at the same tokens, last numbers.

    RunOverview each -> RunComparison -> text of `hlat compare`, or JSON

Losses between two logged steps are interpolated. No run is compared beyond the tokens of the shortest.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.reporting.overview import Curve, RunOverview, flat_settings, read_overview

_PLACES = 8
_OWN = ("run.name", "run.dir")  # differ in any two runs


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side.

    Attributes:
        runs: the runs.
        recipe: fields in which the recipes differ: the value in each run, None where a recipe lacks the field.
        curve: tokens, and the training loss of each run there.
    """

    runs: tuple[RunOverview, ...]
    recipe: dict[str, list[str | None]]
    curve: list[tuple[float, list[float]]]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "runs": [{**run.to_dict(), "loss": None, "recipe": None} for run in self.runs],
            "recipe": self.recipe,
            "curve": [{"tokens": tokens, "loss": losses} for tokens, losses in self.curve],
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


def _curve(curves: Sequence[Curve]) -> list[tuple[float, list[float]]]:
    """Return the losses at some numbers of tokens that all runs have reached."""
    if not curves or not all(curves):
        return []
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    if last < first:
        return []
    count = 1 if first == last else _PLACES
    places = [first + (last - first) * (place + 1) / count if count > 1 else last for place in range(count)]
    return [(tokens, [_at(curve, tokens) for curve in curves]) for tokens in places]


def _at(curve: Curve, tokens: float) -> float:
    """Interpolate a curve linearly; its ends go on as they are."""
    index = bisect_left(curve, (tokens, float("-inf")))
    if index == len(curve):
        return curve[-1][1]
    (x1, y1), (x0, y0) = curve[index], curve[max(0, index - 1)]
    return y1 if x1 <= x0 else y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)
