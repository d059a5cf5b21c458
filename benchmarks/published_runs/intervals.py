"""Intervals of measured over predicted step times, from errors on runs whose source was left out.

    log(measured / predicted) by family and source -> two weighted quantiles, corrected for few sources -> low, high

The unit of evidence is a source, not a run: runs of one source share its errors. The ends have errors of their own,
since runs are more often far slower than predicted than far faster. The rule is conformal prediction over groups (Dunn
et al. 2022 for groups that weigh the same; Romano et al. 2019 for two ends, moved apart by one correction):

- each source of a family weighs 1, shared by its runs;
- the sources of all other families together weigh as two, each the same, so that a family with few sources gets nearly
  the pooled interval, and one with many its own; those of families that borrow another's constants are not among them;
- the ends are the quantiles 0.1 and 0.9, both moved outwards so far that a share of 0.8 (K + c) / K is inside, with K
  the effective number of sources, (sum of weights)^2 / sum of squares (Kish). With c = 1, the finite-sample correction,
  at least 0.8 of new sources are inside, and up to 0.8 + 1 / (K + 1), if sources are exchangeable; uncertain readings
  add to that. So c, between 0 and 1, is fitted: of the sources, each left out, 0.8 are to be inside;
- an interval is never narrower than 1 % to each side.

Uncertain readings of a row widen both sides by their spread (``RatioInterval.widened``).
"""

from collections.abc import Sequence
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from hlat.planner.cost.calibration import INTERVAL_SHARE, RatioInterval
from hlat.planner.problem.workload import CHIP_FAMILIES, Column

_POOLED_WEIGHT = 2.0
_END = (1 + INTERVAL_SHARE) / 2
_NARROWEST = 0.01
_CORRECTIONS = np.linspace(0, 1, 9)
_FEWEST_SOURCES = 10  # below, a coverage of 0.8 cannot be told from the next possible one, and c is 1


class LeftOutErrors:
    """Errors of predictions whose source was left out of the fit.

    Args:
        ratios: measured over predicted step time of each run.
        families: chip family and precision of each run.
        sources: source of each run.
        spreads: what uncertain readings of each run add to its interval; None for nothing.
    """

    def __init__(
        self, ratios: Column, families: Sequence[str], sources: Sequence[str], spreads: Sequence[float] | None = None
    ) -> None:
        self._logs: Column = np.log(ratios)
        self._families = np.array(families, dtype=np.str_)
        self._sources = np.array(sources, dtype=np.str_)
        self._spreads = np.zeros(len(self._logs)) if spreads is None else np.array(spreads, dtype=float)
        self._borrowed = np.array([borrows(name) for name in families], dtype=bool)
        self._fitted: dict[str | None, int] = {}

    def interval(self, family: str, without: str | None = None) -> RatioInterval:
        """The interval of a family's runs.

        Args:
            family: chip family and precision; one without runs gets the pooled interval.
            without: source whose runs may not be used, to count the coverage on it.

        Returns:
            The factors; (0.5, 2) if there are no runs at all.
        """
        return self._intervals(family, {without})[self.correction(without)]

    def correction(self, without: str | None = None) -> int:
        """Position in ``_CORRECTIONS`` with which the coverage of sources, each left out, is nearest to the wanted one.

        Args:
            without: source whose runs may not be used.
        """
        if without not in self._fitted:
            covered = [self._covered(name, without) for name in sorted({*self._sources} - {without})]
            few = len(covered) < _FEWEST_SOURCES
            off = np.abs(np.mean(covered, axis=0) - INTERVAL_SHARE) if covered else np.zeros(1)
            # Of equally good ones the widest.
            self._fitted[without] = len(_CORRECTIONS) - 1 if few else int(np.flatnonzero(off <= off.min() + 1e-9)[-1])
        return self._fitted[without]

    def _covered(self, source: str, without: str | None) -> Column:
        """Share of the runs of a source inside intervals that have not seen it, for every correction."""
        inside = np.zeros(len(_CORRECTIONS))
        rows = self._sources == source
        for family in np.unique(self._families[rows]):
            found = self._intervals(str(family), {source, without})
            for row in np.flatnonzero(rows & (self._families == family)):
                wide = [one.widened(float(self._spreads[row])) for one in found]
                inside += [log(one.low) <= self._logs[row] <= log(one.high) for one in wide]
        share: NDArray[np.float64] = inside / rows.sum()
        return share

    def _intervals(self, family: str, without: set[str | None]) -> list[RatioInterval]:
        """The interval of a family, without the runs of some sources, for every correction."""
        allowed = ~np.isin(self._sources, [name for name in without if name is not None])
        own, other = allowed & (self._families == family), allowed & (self._families != family) & ~self._borrowed
        if not (own | other).any():
            return [RatioInterval(0.5, 2.0, 0)] * len(_CORRECTIONS)
        weights = np.zeros(len(self._logs))
        weights[own] = self._equal_sources(own)
        if other.any():
            pooled = self._equal_sources(other)
            weights[other] = pooled * (_POOLED_WEIGHT / pooled.sum())
        sources = np.array([weights[own & (self._sources == name)].sum() for name in set(self._sources[own])])
        others = np.array([weights[other & (self._sources == name)].sum() for name in set(self._sources[other])])
        each = np.concatenate((sources, others))
        effective = float(each.sum() ** 2 / (each**2).sum())
        high, low = (side * weighted_quantile(side * self._logs, weights, _END) for side in (1, -1))
        outside = np.maximum(low - self._logs, self._logs - high)
        levels = INTERVAL_SHARE * (effective + _CORRECTIONS) / effective
        moved = (weighted_quantile(outside, weights, float(level)) for level in levels)
        middle = exp(weighted_quantile(self._logs, weights, 0.5))
        ends = [(exp(min(low - apart, -_NARROWEST)), exp(max(high + apart, _NARROWEST))) for apart in moved]
        return [RatioInterval(*pair, len(sources), middle=middle) for pair in ends]

    def _equal_sources(self, rows: NDArray[np.bool_]) -> Column:
        """Weights of some runs that add up to 1 for each source."""
        _, group, counts = np.unique(self._sources[rows], return_inverse=True, return_counts=True)
        shares: Column = 1.0 / counts[group]
        return shares


def borrows(family: str) -> bool:
    """True if a family of chips, with " fp8" after it or not, has the constants of another."""
    return bool(CHIP_FAMILIES[family.removesuffix(" fp8")].like)


def weighted_quantile(values: Column, weights: Column, level: float) -> float:
    """The smallest value up to which at least a share of the weight lies; the largest if none is enough."""
    values, weights = values[weights > 0], weights[weights > 0]
    order = np.argsort(values)
    up_to = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(up_to, level - 1e-12).clip(0, len(values) - 1)])
