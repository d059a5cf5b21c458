"""Refusals of designs that determine no law, and the further run that would say most.

sizes and tokens of runs --check_design--> PlanError: what is missing, and what would do
LawFit, target --best_next_run--> NextRun: how much narrower the range of the target would be
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hlat.forecast.fitting import LEAST_RUNS, LawFit, LossRange, Observation, count_different
from hlat.forecast.law import FLOPS_PER_PARAMETER
from hlat.runtime.errors import PlanError

LEAST_SIZES, LEAST_TOKEN_COUNTS = 3, 2
"""Below them, what E, size and tokens contribute to the loss cannot be told apart."""
WIDEST_RANGE = 2.0
"""Ratio of the ends of a range, above the irreducible loss, up to which a forecast is given."""
FAR = 100.0
"""Factor of FLOPs beyond the largest run from which a forecast comes with a warning."""
FEW_TOKENS = 1.5
"""Factor between a ladder's least tokens per parameter and those of a run, from which there is a warning."""
_APART = 1.1  # factor between two sizes, or token counts, that count as two
_NEARLY = 0.9  # of the most that a further run could narrow the range
_GRID = 7


class NextRun(NamedTuple):
    """A further run of a ladder: its size as the law counts it, its tokens and FLOPs."""

    size: float
    tokens: float
    flops: float
    narrowing: float  # width of the target's range with it, as a share of the width without


def check_design(runs: Sequence[Observation]) -> None:
    """Raise PlanError, with every reason, if runs cannot determine a law."""
    if problems := list(_design_problems(runs)):
        raise PlanError("The ladder determines no law: " + " ".join(problems))


def _design_problems(runs: Sequence[Observation]) -> Iterator[str]:
    broken = [run for run in runs if not all(math.isfinite(value) and value > 0 for value in run[:3])]
    if broken:
        yield f"{len(broken)} of its runs have a size, tokens or loss that is no positive number; leave them out."
    if (count := count_different(runs)) < LEAST_RUNS:
        kinds = "finished runs that differ by more than their seed" if count < len(runs) else "finished runs"
        yield f"it has {count} {kinds}, and needs {LEAST_RUNS}; train {LEAST_RUNS - count} more."
    axes = (("sizes", [run.size for run in runs], LEAST_SIZES), ("counts of tokens", [run.tokens for run in runs],
            LEAST_TOKEN_COUNTS))  # fmt: skip
    for name, values, least in axes:
        if not broken and (count := _apart(values)) < least:
            yield (
                f"its runs have {count} {name} that are a factor of {_APART} apart, and it needs {least}; "
                f"train runs of {least - count} more."
            )


def _apart(values: Iterable[float]) -> int:
    count, last = 0, 0.0
    for value in sorted(values):
        if value >= last * _APART:
            count, last = count + 1, value
    return count


def above_irreducible(loss: LossRange, irreducible: float) -> float:
    """Return the ratio of the ends of a range, counted from the irreducible loss; infinite if it includes that."""
    return (loss.high - irreducible) / (loss.low - irreducible) if loss.low > irreducible else math.inf


def best_next_run(
    fit: LawFit,
    runs: Sequence[Observation],
    target: tuple[float, float],
    candidates: Iterable[tuple[float, float]] = (),
) -> NextRun:
    """Return the further run to train next: the cheapest that narrows the range of a target nearly as much as any.

    Without candidates (size, tokens), those are of a grid around the runs, each for at most the FLOPs of the largest.
    """
    pairs = list(candidates) or _grid(runs)
    flops = [FLOPS_PER_PARAMETER * size * tokens for size, tokens in pairs]
    found = [NextRun(*pair, cost, fit.narrowing(pair, target)) for pair, cost in zip(pairs, flops, strict=True)]
    enough = 1 - _NEARLY * (1 - min(run.narrowing for run in found))
    return min((run for run in found if run.narrowing <= enough), key=lambda run: run.flops)


def _grid(runs: Sequence[Observation]) -> list[tuple[float, float]]:
    """Return sizes and tokens that runs of a ladder may have."""
    sizes, tokens = (
        np.geomspace(min(values), 2 * max(values), _GRID).tolist()
        for values in ([run.size for run in runs], [run.tokens for run in runs])
    )
    most = max(run.size * run.tokens for run in runs)
    # Below the ladder's own tokens per parameter, what is left of the warm-up decides the loss.
    least = min(run.tokens / run.size for run in runs)
    return [(size, count) for size in sizes for count in tokens if size * count <= most and count >= least * size]
