"""Offers to a buyer: runs on clusters of a kind of instance, the goal that they are to meet, and which are computed.

    kind, number --Kind.at--> Offer (a prediction), or None: no layout is possible, or none fits
    kind, condition --Kind.first--> the smallest number that meets it
    "14d", "50,000" --parse_goal--> Goal: deadline, budget, both or neither --> which offers meet it, the best of those
    goal, kinds --explore--> the best offer of each kind that can be the best of all, and why the others cannot

Numbers that are tried are 1, 2, 3, ... 8, then eight between a number and its double: 9, 10, ... 16, 18, 20, ... 32.

A run on twice the instances takes fewer days and costs more, apart from small steps. So deadline and budget each have a
power of two from which on they are met, or no more met. A few predictions find it. Kinds that are unlikely to be the
best are left early, and say why.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from hlat.hardware import Chip, Cluster, Instance
from hlat.model import flops_per_token
from hlat.planner.expected import likely, two_digits, whole_run
from hlat.planner.problem.devices import request_device
from hlat.planner.problem.request import PlanRequest
from hlat.planner.search import LayoutPrediction, best_layout
from hlat.runtime.errors import PlanError
from hlat.runtime.quantities import rounded_text, usd_text

_MAX_INSTANCES = 1 << 12  # where a search that finds nothing ends
_PER_DOUBLING = 8  # numbers tried between one and its double: steps of 6 to 13 %
_FIRST_GUESS = 0.4  # share of the peak that the first number of a search assumes; others follow from its prediction
_GUESSES = 4  # numbers that are chosen by extrapolation, before the rest is halved
_DAY = 86400.0


@dataclass(frozen=True)
class Offer:
    """A run on one cluster."""

    request: PlanRequest
    prediction: LayoutPrediction  # of its best layout

    @property
    def cluster(self) -> Cluster:
        return self.request.cluster

    @property
    def days(self) -> float:
        """Failures and saves included."""
        return self.prediction.days

    @property
    def usd(self) -> float | None:
        return self.prediction.cost_usd

    @property
    def price(self) -> float:
        """Order of offers of one kind by cost: USD, or instance-days without a price."""
        return self.days * self.cluster.count if self.usd is None else self.usd

    @property
    def slow_end(self) -> "Offer":
        """The run at the slow end of the range in which 4 of 5 runs are expected."""
        interval = self.prediction.interval
        return Offer(self.request, self.prediction.lasting(interval.high / interval.median))

    def with_tokens(self, tokens: int) -> "Offer":
        """Scale days, cost and energy to another number of tokens."""
        share = tokens / self.request.tokens
        return Offer(replace(self.request, tokens=tokens), self.prediction.lasting(share))


@dataclass
class Kind:
    """One kind of instance, and the offers that were computed for it."""

    instance: Instance
    chip: Chip
    request_on: Callable[[Cluster], PlanRequest]  # raises PlanError for a cluster that no request is possible on
    # By number of instances; None where the run is impossible.
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
        return Cluster(self.instance, self.chip, number)

    def _predict(self, cluster: Cluster) -> Offer | None:
        try:
            request = self.request_on(cluster)
            found = [best_layout(one) for one in request.stages.values() or [request]]
        except PlanError:  # a batch that this number does not divide, or failures without progress
            return None
        fitting = [one for one in found if one is not None]
        return None if len(fitting) < len(found) else Offer(request, likely(whole_run(fitting)))

    def number_for(self, days: float) -> float:
        """Return the number of instances that would take so many days at a usual share of the peak.

        PlanError if no request is possible on this kind; ``without_refusals`` says so beforehand.
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

        Args:
            enough: true for a cluster that is at least as large as wanted; stays true for larger powers of two.
            begin: number to begin with.
            estimate: number that might just be enough, from any offer; None to double and halve.
            hopeless: true for an offer after which no larger number is of interest.
        """
        # Powers of two first, since layouts and batches divide by them; then the numbers below the first that is
        # enough.
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
    """Yield 1, 2, ... 8, then eight numbers for each doubling."""
    number = 1
    while number <= most:
        yield number
        number += max(1, (1 << (number.bit_length() - 1)) // _PER_DOUBLING)


KNEE = 1.1
"""Without a goal, a cluster grows as long as its run costs at most this many times the cheapest run of its kind."""

_DAYS_OF_UNIT = {"h": 1 / 24, "d": 1.0, "w": 7.0}
_MONEY_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([hdw])", re.IGNORECASE)
_MONEY = re.compile(r"\$?\s*(\d[\d_,]*(?:\.\d+)?)\s*([km]?)(?:\s*(?:\$|usd))?", re.IGNORECASE)


@dataclass(frozen=True)
class Goal:
    """Limits of a run: a deadline, a budget, both or neither."""

    days: float | None = None  # the longest duration, failures and saves included; None for any
    usd: float | None = None  # the highest cost; None for any

    @property
    def by_time(self) -> bool:
        """The fastest offer is the best: there is a budget, and no deadline."""
        return self.days is None and self.usd is not None

    def meets(self, offer: Offer) -> bool:
        in_time = self.days is None or offer.days <= self.days
        return in_time and (self.usd is None or (offer.usd is not None and offer.usd <= self.usd))

    def shrunk(self, factor: float) -> "Goal":
        """Return limits that many times as tight."""
        days, usd = (None if limit is None else limit / factor for limit in (self.days, self.usd))
        return Goal(days, usd)

    def order(self, offer: Offer) -> tuple[float, float]:
        """Key of offers of several kinds, the best first."""
        return (offer.days, offer.price) if self.by_time else (offer.price, offer.days)

    def best(self, offers: Sequence[Offer]) -> Offer | None:
        """Return the best offer of one kind that meets the goal; None if there is none.

        With a deadline the cheapest (by instance-days without prices), with a budget alone the fastest, without a goal
        the largest cluster on the flat part of the cost, ``KNEE``.
        """
        meeting = [offer for offer in offers if self.meets(offer)]
        if not meeting:
            return None
        if self.by_time or self.days is not None:
            return min(meeting, key=self.order)
        cheapest = min(meeting, key=self.order)
        flat = [offer for offer in meeting if offer.price <= KNEE * cheapest.price]
        return min(flat, key=lambda offer: offer.days)

    def __str__(self) -> str:
        words = [] if self.days is None else [f"done in {_time(self.days)}"]
        words += [] if self.usd is None else [f"for at most ${self.usd:,.0f}"]
        knee = f"the largest cluster whose run costs at most {KNEE - 1:.0%} more than the cheapest"
        return " ".join(words) or knee


def parse_goal(deadline: str | None, budget: str | None) -> Goal:
    """Read a deadline such as 36h, 14d or 2w, and a budget in USD such as 50000, 50,000 or 50k.

    Raises:
        PlanError: a text is something else, or zero; names all of them.
    """
    problems = []
    days = usd = None
    if deadline is not None:
        found = _DURATION.fullmatch(deadline.strip())
        days = float(found[1]) * _DAYS_OF_UNIT[found[2].lower()] if found else 0.0
        if not days:
            problems.append(f"--deadline {deadline}: must be a positive time in hours, days or weeks: 36h, 14d or 2w")
    if budget is not None:
        found = _MONEY.fullmatch(budget.strip())
        usd = float(found[1].replace("_", "").replace(",", "")) * _MONEY_FACTORS[found[2].lower()] if found else 0.0
        if not usd:
            problems.append(f"--budget {budget}: must be a positive number of US dollars: 50000, 50,000 or 50k")
    if problems:
        raise PlanError("\n".join(problems))
    return Goal(days, usd)


def _time(days: float) -> str:
    number, unit = (rounded_text(days), "day") if days >= 1 else (rounded_text(days * 24), "hour")
    return f"{number} {unit}{'' if number == '1' else 's'}"


_FAR = 1.15
"""Without a goal, a kind is left if its run costs so many times the best one where it was tried first."""

_DEAR = 3.0
"""With a deadline, a kind is left if a run that is too slow costs so many times the best: a faster one costs more."""

_FIRST = 8  # instances with which a kind is tried first


def explore(goal: Goal, kinds: Sequence[Kind]) -> tuple[list[tuple[Offer, Kind]], dict[str, str]]:
    """Find the best offer of each kind, the best of all first, and the reason by kind that has none."""
    kinds, missed = without_refusals(kinds)
    found: list[tuple[Offer, Kind]] = []
    for kind in kinds if goal.days is not None else _cheapest_first(kinds, missed):
        best = min((offer for offer, _ in found), key=goal.order, default=None)
        # The kinds before this one set the bar; without a deadline they come cheapest first, so that it is high early.
        hopeless = _hopeless(goal, kind, best)
        if hopeless:
            missed[kind.instance.name] = hopeless
            continue
        compute(goal, kind, best)
        offer = goal.best(kind.offers)
        if offer is None:
            missed[kind.instance.name] = _dear(kind.offers, best) or _how_close(goal, kind.offers)
        else:
            found.append((offer, kind))
    return sorted(found, key=lambda pair: goal.order(pair[0])), missed


def without_refusals(kinds: Sequence[Kind]) -> tuple[list[Kind], dict[str, str]]:
    """Split kinds into those on which a request is possible, and reasons for the others."""
    possible, missed = list[Kind](), dict[str, str]()
    for kind in kinds:
        try:
            kind.request_on(kind.cluster(1))
            possible.append(kind)
        except PlanError as error:  # as for an option that its chip does not support
            missed[kind.instance.name] = str(error)
    return possible, missed


def compute(goal: Goal, kind: Kind, best: Offer | None = None) -> None:
    """Compute the offers of a kind among which the best one for a goal is; ``best`` is that of the other kinds."""
    days, usd = goal.days, goal.usd
    if days is not None:
        kind.first(
            lambda offer: offer.days <= days,
            kind.number_for(days),
            lambda offer: offer.cluster.count * offer.days / days,
            lambda offer: bool(_dear([offer], best)),
        )
    elif usd is not None:
        kind.first(lambda offer: offer.price > usd, _FIRST)
    else:
        cheapest = float("inf")
        for offer in kind.doublings():
            cheapest = min(cheapest, offer.price)
            if offer.price > KNEE * cheapest:
                return


def _cheapest_first(kinds: Sequence[Kind], missed: dict[str, str]) -> list[Kind]:
    """Order kinds by the cost on a few instances; fill ``missed`` with those on which no number is possible."""
    costs = []
    for kind in kinds:
        offer = _first_offer(kind)
        if offer is None:
            missed[kind.instance.name] = _how_close(Goal(), [])
        else:
            costs.append((offer.price, kind))
    return [kind for _, kind in sorted(costs, key=lambda pair: pair[0])]


def _first_offer(kind: Kind) -> Offer | None:
    # Too few instances lack memory, so larger numbers first; too many do not divide the batch, or fail too often to
    # make progress.
    numbers = [_FIRST << power for power in range(10)] + [_FIRST >> power for power in range(1, 4)]
    return next((offer for offer in map(kind.at, numbers) if offer is not None), None)


def _hopeless(goal: Goal, kind: Kind, best: Offer | None) -> str:
    """Reason why no number of a kind can beat the best offer so far; empty if one might."""
    # With a deadline, ``compute`` stops by itself at the first offer that is too dear.
    if best is None or goal.days is not None:
        return ""
    first = _first_offer(kind)
    assert first is not None, "kinds without offers have been left"
    if goal.usd is None:
        if first.price <= _FAR * best.price or (first.usd is None) != (best.usd is None):
            return ""
        return f"{_cost(first)} on {first.cluster.count:,}, too far from the best to be explored"
    # To be as fast as the best, it needs so many instances at least; if they are too expensive, so are more of them.
    needed = ceil(first.cluster.count * first.days / best.days)
    if needed <= first.cluster.count:
        return ""
    offers = [offer for offer in map(kind.at, (needed, 1 << (needed - 1).bit_length())) if offer is not None]
    if not offers or any(offer.price <= goal.usd for offer in offers):
        return ""
    cheapest = min(offers, key=lambda offer: offer.price)
    return f"{_cost(cheapest)} on {cheapest.cluster.count:,}, about the fewest that might be as fast as the best"


def _dear(offers: Sequence[Offer], best: Offer | None) -> str:
    """Say that the last of some offers costs far more than the best of other kinds; empty if it does not."""
    if best is None or not offers:
        return ""
    last = offers[-1]
    if last.usd is None or best.usd is None or last.usd <= _DEAR * best.usd:
        return ""
    days = two_digits(last.days)
    return f"{_cost(last)} in {days} days on {last.cluster.count:,}, far from the best and not explored further"


def _how_close(goal: Goal, offers: Sequence[Offer]) -> str:
    if not offers:
        return "no layout of the model fits"
    fastest = min(offers, key=lambda offer: offer.days)
    cheapest = min(offers, key=lambda offer: offer.price)
    words = []
    if goal.days is not None:
        words.append(f"the fastest is {fastest.cluster.name} with {two_digits(fastest.days)} days")
    if goal.usd is not None:
        days = two_digits(cheapest.days)
        words.append(f"the cheapest is {cheapest.cluster.name} with {_cost(cheapest)} in {days} days")
    return "; ".join(words)


def _cost(offer: Offer) -> str:
    return "no known price" if offer.usd is None else usd_text(offer.usd)
