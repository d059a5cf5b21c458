"""Runs on clusters of one kind of instance, of any number of instances.

    kind, number --Kind.at--> Offer (a prediction), or None: no layout is possible, or none fits

Numbers that are tried are 1, 2, 3, ... 8, then eight between a number and its double: 9, 10, ... 16, 18, 20, ... 32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hlat.hardware import Chip, Cluster, Instance
from hlat.planner.problem import PlanRequest
from hlat.planner.search import LayoutPrediction, best_layout
from hlat.runtime import PlanError

_MAX_INSTANCES = 1 << 12
_PER_DOUBLING = 8


@dataclass(frozen=True)
class Offer:
    """A run on one cluster.

    Attributes:
        request: the run.
        prediction: its best layout.
    """

    request: PlanRequest
    prediction: LayoutPrediction

    @property
    def cluster(self) -> Cluster:
        """Cluster of the run."""
        return self.request.cluster

    @property
    def days(self) -> float:
        """Duration of the run in days, failures and saves included."""
        return self.prediction.days

    @property
    def usd(self) -> float | None:
        """Cost of the run in USD; None if the instance has no price."""
        return self.prediction.cost_usd

    @property
    def price(self) -> float:
        """Number that orders offers of one kind by cost: USD, or instance-days without a price."""
        return self.days * self.cluster.count if self.usd is None else self.usd


@dataclass
class Kind:
    """One kind of instance, and the offers that were computed for it.

    Attributes:
        instance: the instance.
        chip: its chip.
        request_on: the request on a cluster. It raises PlanError for a cluster that no request is possible on.
    """

    instance: Instance
    chip: Chip
    request_on: Callable[[Cluster], PlanRequest]
    _offers: dict[int, Offer | None] = field(default_factory=dict)

    @property
    def offers(self) -> list[Offer]:
        """Offers computed so far, the smallest cluster first."""
        return [offer for _, offer in sorted(self._offers.items()) if offer is not None]

    def at(self, number: int) -> Offer | None:
        """Predict the run on a number of instances; None if it is not possible there."""
        if number not in self._offers:
            self._offers[number] = self._predict(Cluster(self.instance, self.chip, number))
        return self._offers[number]

    def _predict(self, cluster: Cluster) -> Offer | None:
        try:
            request = self.request_on(cluster)
            best = best_layout(request)
        except PlanError:  # a batch that this number does not divide, or failures without progress
            return None
        return None if best is None else Offer(request, best)

    def explore(self, enough: Callable[[Offer], bool]) -> None:
        """Compute offers of growing clusters until one is enough, then between it and the last that was not.

        Args:
            enough: true for a cluster that is at least as large as wanted. It stays true for larger ones.
        """
        below = 0
        for number in _doublings():
            offer = self.at(number)
            if offer is None and self.offers:
                return  # more devices than the batch has sequences
            if offer is not None and enough(offer):
                self._refine(below, number, enough)
                return
            below = number

    def _refine(self, below: int, above: int, enough: Callable[[Offer], bool]) -> None:
        """Find the smallest number that is enough, by halving the numbers between two."""
        between = [number for number in _numbers(above) if below < number < above]
        while between:
            middle = len(between) // 2
            offer = self.at(between[middle])
            if offer is None:
                del between[middle]
            elif enough(offer):
                between = between[:middle]
            else:
                between = between[middle + 1 :]


def _doublings() -> Iterator[int]:
    return (1 << power for power in range(_MAX_INSTANCES.bit_length()))


def _numbers(largest: int) -> Iterator[int]:
    """Yield the numbers of instances that are tried, up to one."""
    number = 1
    while number <= largest:
        yield number
        number += max(1, (1 << (number.bit_length() - 1)) // _PER_DOUBLING)
