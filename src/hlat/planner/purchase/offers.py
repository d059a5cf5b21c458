"""Runs on clusters of one kind of instance, of any number of instances.

    kind, number --Kind.at--> Offer (a prediction), or None: no layout is possible, or none fits
    kind, condition --Kind.first--> the smallest number that meets it

Numbers that are tried are 1, 2, 3, ... 8, then eight between a number and its double: 9, 10, ... 16, 18, 20, ... 32.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from hlat.hardware import Chip, Cluster, Instance
from hlat.model import flops_per_token
from hlat.planner.problem.devices import request_device
from hlat.planner.problem.request import PlanRequest
from hlat.planner.search.quick_search import best_layout
from hlat.planner.search.search import LayoutPrediction
from hlat.runtime.errors import PlanError

_MAX_INSTANCES = 1 << 12
_PER_DOUBLING = 8
_FIRST_GUESS = 0.4  # share of the peak that the first number of a search assumes; others follow from its prediction
_GUESSES = 4  # numbers that are chosen by extrapolation, before the rest is halved
_DAY = 86400.0


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

    @property
    def slow_end(self) -> "Offer":
        """The run at the slow end of the range in which 4 of 5 runs are expected."""
        one, high = self.prediction, self.prediction.interval.high
        cost = None if one.cost_usd is None else high * one.cost_usd
        return Offer(self.request, replace(one, days=high * one.days, cost_usd=cost))

    def with_tokens(self, tokens: int) -> "Offer":
        """Return the run with another number of tokens, to which days, cost and energy are proportional."""
        share, one = tokens / self.request.tokens, self.prediction
        cost, kwh = (None if value is None else share * value for value in (one.cost_usd, one.kwh))
        return Offer(replace(self.request, tokens=tokens), replace(one, days=share * one.days, cost_usd=cost, kwh=kwh))


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
            self._offers[number] = self._predict(self.cluster(number))
        return self._offers[number]

    def cluster(self, number: int) -> Cluster:
        """Return the cluster of a number of instances."""
        return Cluster(self.instance, self.chip, number)

    def refusal(self) -> str:
        """Return the reason why no request is possible on this kind, as by options that its chip has no support for."""
        try:
            self.request_on(self.cluster(1))
        except PlanError as error:
            return str(error)
        return ""

    def _predict(self, cluster: Cluster) -> Offer | None:
        try:
            request = self.request_on(cluster)
            best = best_layout(request)
        except PlanError:  # a batch that this number does not divide, or failures without progress
            return None
        return None if best is None else Offer(request, best)

    def number_for(self, days: float) -> float:
        """Return the number of instances that would take so many days at a usual share of the peak.

        Raises:
            PlanError: no request is possible on this kind; ``refusal`` says so beforehand.
        """
        request = self.request_on(self.cluster(1))
        flops = request.tokens * flops_per_token(request.model, request.sequence, "causal")
        rate = request_device(request).peak * self.cluster(1).devices
        return flops / (_FIRST_GUESS * rate * days * _DAY)

    def first(
        self,
        enough: Callable[[Offer], bool],
        begin: float,
        estimate: Callable[[Offer], float] | None = None,
        hopeless: Callable[[Offer], bool] = lambda offer: False,
    ) -> Offer | None:
        """Find the offer of the smallest number that is enough; None if there is none, or it is hopeless.

        Powers of two come first, since layouts and batches divide by them; then the numbers between the first that is
        enough and its half.

        Args:
            enough: true for a cluster that is at least as large as wanted. It stays true for larger powers of two.
            begin: number to begin with.
            estimate: number that might just be enough, from any offer; None to double and halve.
            hopeless: true for an offer after which no larger number is of interest.
        """
        powers = [1 << power for power in range(_MAX_INSTANCES.bit_length())]
        found = self._first_of(powers, enough, begin, estimate, hopeless)
        if found is None:
            return None
        most = found.cluster.count
        between = [number for number in numbers_tried(most) if most // 2 < number < most]
        return self._first_of(between, enough, estimate(found) if estimate else 0.75 * most, estimate) or found

    def _first_of(
        self,
        numbers: list[int],
        enough: Callable[[Offer], bool],
        begin: float,
        estimate: Callable[[Offer], float] | None,
        hopeless: Callable[[Offer], bool] = lambda offer: False,
    ) -> Offer | None:
        """Find the first of some numbers that is enough, as ``first`` does, in few predictions."""
        low, high, found = -1, len(numbers), None
        position, tried = max(0, min(bisect_left(numbers, begin), high - 1)), 0
        while low + 1 < high:
            offer = self.at(numbers[position])
            if offer is None:  # impossible: for lack of memory below what is possible, or of sequences above it
                large = any(one.cluster.count < numbers[position] for one in self.offers)
                del numbers[position]
                high -= 1
                position = max(low + 1, min(position - large, high - 1))
                continue
            tried += 1
            if enough(offer):
                high, found = position, offer
            elif hopeless(offer):
                return None
            else:
                low = position
            guess = (low + high) // 2 if high < len(numbers) else low + 1
            if estimate is not None and tried <= _GUESSES:
                guess = bisect_left(numbers, estimate(offer))
            position = max(low + 1, min(guess, high - 1))
        return found

    def doublings(self, largest: int = _MAX_INSTANCES) -> Iterator[Offer]:
        """Yield the offers of 1, 2, 4, ... instances, up to the first that is too large for the run's batch."""
        number, possible = 1, False
        while number <= largest:
            offer = self.at(number)
            if offer is not None:
                possible = True
                yield offer
            elif possible:
                return
            number *= 2


def numbers_tried(most: int) -> Iterator[int]:
    """Yield the numbers of instances that are tried, up to one."""
    number = 1
    while number <= most:
        yield number
        number += max(1, (1 << (number.bit_length() - 1)) // _PER_DOUBLING)
