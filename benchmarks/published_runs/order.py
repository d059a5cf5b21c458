"""Order of two layouts: how often the model is right, and from which difference on it is in four of five pairs.

    pairs of runs of one job in two layouts -> |log(measured ratio / predicted ratio)| -> quantile -> a ratio

Two layouts of one job share the chips, the software and the page, and so most of the model's error; an interval of a
step time says little about their order. If the logarithms of errors of ratios are symmetric around 0, a pair predicted
to differ by the factor r is measured in the other order with half the probability that an error exceeds log r. So the
order is right in four of five pairs from the 60 % quantile of the errors' sizes on. Each source weighs the same, and
the level is corrected for few sources as in intervals.py.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import combinations
from math import exp

import numpy as np

from hlat.planner.problem.workload import Column
from published_runs.intervals import weighted_quantile

_LEVEL = 0.6


class PairErrors:
    """Errors of the ratio of two step times, over all pairs of runs of one job.

    Args:
        ratios: measured over predicted step time of each run, its source left out of the fit.
        predicted: predicted step time of each run.
        jobs: what a run has in common with those that differ in the layout only; begins with the source.

    Attributes:
        pairs: number of pairs.
        sources: number of sources that have one.
    """

    def __init__(self, ratios: Column, predicted: Column, jobs: Sequence[tuple[str, *tuple[Hashable, ...]]]) -> None:
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for index, job in enumerate(jobs):
            groups[job].append(index)
        errors, steps, names = np.log(ratios), np.log(predicted), []
        found = []
        for (source, *_), members in ((jobs[group[0]], group) for group in groups.values()):
            for one, other in combinations(members, 2):
                found.append((errors[one] - errors[other], steps[one] - steps[other]))
                names.append(source)
        self._errors, self._gaps = np.array(found).reshape(-1, 2).T
        self._sources = np.array(names, dtype=np.str_)
        self.pairs, self.sources = len(found), len(set(names))

    def undecided_ratio(self) -> float:
        """The ratio of predicted step times from which on the order is right in four of five pairs; 1 without pairs."""
        if not self.pairs:
            return 1.0
        _, group, counts = np.unique(self._sources, return_inverse=True, return_counts=True)
        level = min(1.0, _LEVEL * (self.sources + 1) / self.sources)
        return exp(weighted_quantile(np.abs(self._errors), 1.0 / counts[group], level))

    def ordered(self) -> tuple[float | None, float | None]:
        """Share of pairs in the right order: of those closer than ``undecided_ratio``, and of the others."""
        right = np.sign(self._gaps) == np.sign(self._gaps + self._errors)
        near = np.abs(self._gaps) < np.log(self.undecided_ratio())
        return _mean(right[near]), _mean(right[~near])


def _mean(values: Column) -> float | None:
    return float(values.mean()) if len(values) else None
