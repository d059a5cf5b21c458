"""Exact counts of memory for layouts whose estimate is a little over the limit, as many as a search has time for.

    estimates of ranks (layers divided evenly) -> fits | cannot fit | doubtful -> counted with the split of the program

The estimate of a search divides the layers of a pipeline evenly. The program gives fewer to a rank that needs more
memory (embedding, head, more micro-batches in flight), so that a layout can fit whose estimate does not. It cannot if
the mean of its ranks is over the limit, since what one rank gives up another one takes.
"""

from collections.abc import Sequence

from hlat.planner.memory.rank_memory import estimate_rank_memory, rank_memory, ranks_of_interest
from hlat.planner.problem.layouts import Candidate
from hlat.planner.problem.request import PlanRequest

_MOST_CHECKS = 24  # of about 10 ms each
_FURTHEST = 1.5  # times the limit; estimates of random layouts were at most 1.37 times the exact count


def possible_peak_ranks(candidate: Candidate) -> list[int]:
    """Pipeline ranks one of which needs most memory: the first, the last, and the second.

    The second has message buffers on both sides and, of the ranks that do, the most micro-batches in flight.
    """
    return sorted({0, min(1, candidate.pipeline - 1), candidate.pipeline - 1})


def estimated_ranks(request: PlanRequest, candidate: Candidate, most: float | None = None) -> list[float]:
    """Estimate the bytes of the ranks that may need most, without counting every parameter.

    Args:
        request: the run.
        candidate: the layout.
        most: bytes; a rank that needs more ends the list.
    """
    found: list[float] = []
    for rank in possible_peak_ranks(candidate):
        found.append(estimate_rank_memory(request, candidate, rank).total)
        if most is not None and found[-1] > most:
            break
    return found


class ExactChecks:
    """Check of which layouts fit; doubtful ones are counted exactly, no more than ``_MOST_CHECKS`` of them.

    Args:
        request: the run.
        limit: bytes of a device.

    Attributes:
        found: number of layouts that fit though their estimate does not.
    """

    def __init__(self, request: PlanRequest, limit: float) -> None:
        self._request, self._limit = request, limit
        self._left = _MOST_CHECKS
        self.furthest = _FURTHEST * limit
        self.found = 0

    def may_fit(self, layout: Candidate, estimates: Sequence[float]) -> bool:
        """True if the layout fits by its estimate, or might with layers divided unevenly.

        Args:
            layout: the layout.
            estimates: bytes of its ranks, by ``estimated_ranks``.
        """
        if max(estimates) <= self._limit:
            return True
        if layout.pipeline == 1 or max(estimates) > self.furthest:
            return False
        # Ranks between the second and the last need no more than the second.
        mean = (sum(estimates) + (layout.pipeline - len(estimates)) * estimates[-2]) / layout.pipeline
        return mean <= self._limit

    def fits(self, layout: Candidate, estimates: Sequence[float]) -> bool:
        """True if the layout fits: by its estimate, or by an exact count if there is one left."""
        if max(estimates) <= self._limit:
            return True
        if not self._left or not self.may_fit(layout, estimates):
            return False
        self._left -= 1
        ranks = ranks_of_interest(self._request, layout)
        fits = max(rank_memory(self._request, layout, rank).total for rank in ranks) <= self._limit
        self.found += fits
        return fits
