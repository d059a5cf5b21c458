"""The offers that are computed for a goal: enough of them for the best, and no more.

    goal, kinds --explore--> the best offer of each kind that can be the best of all, and why the others cannot

A run on twice the instances takes fewer days and costs more, apart from small steps. So a deadline and a budget each
have a power of two from which on they are met, or no more met, which is found in a few predictions. Kinds that cannot
be the best are left as soon as that is likely enough, and say why.
"""

from collections.abc import Sequence
from math import ceil

from hlat.planner.purchase.goal import KNEE, Goal
from hlat.planner.purchase.offers import Kind, Offer
from hlat.runtime.quantities.formatting import rounded_text

_FAR = 1.15
"""Without a goal, a kind is left if its run costs so many times the best one where it was tried first."""

_DEAR = 3.0
"""With a deadline, a kind is left if a run that is too slow costs so many times the best: a faster one costs more."""

_FIRST = 8  # instances of that first try


def explore(goal: Goal, kinds: Sequence[Kind]) -> tuple[list[tuple[Offer, Kind]], dict[str, str]]:
    """Find the best offer of each kind, the best of all first, and the reason by kind that has none.

    Args:
        goal: limits of the run.
        kinds: kinds of instances.
    """
    kinds, missed = without_refusals(kinds)
    found: list[tuple[Offer, Kind]] = []
    for kind in kinds if goal.days is not None else _cheapest_first(kinds, missed):
        best = min((offer for offer, _ in found), key=goal.order, default=None)
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
    """Return the kinds on which a request is possible, and the reason by kind on which none is."""
    refusals = [(kind, kind.refusal()) for kind in kinds]
    missed = {kind.instance.name: reason for kind, reason in refusals if reason}
    return [kind for kind, reason in refusals if not reason], missed


def compute(goal: Goal, kind: Kind, best: Offer | None = None) -> None:
    """Compute the offers of a kind among which the best one for a goal is.

    Args:
        goal: limits of the run.
        kind: kind of instance.
        best: the best offer of other kinds so far.
    """
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
    """Order kinds by the cost of their run on a few instances; those on which no number is possible are missed."""
    costs = []
    for kind in kinds:
        offer = _first_offer(kind)
        if offer is None:
            missed[kind.instance.name] = _how_close(Goal(), [])
        else:
            costs.append((offer.price, kind))
    return [kind for _, kind in sorted(costs, key=lambda pair: pair[0])]


def _first_offer(kind: Kind) -> Offer | None:
    """Return the offer of a few instances, or of the next possible numbers."""
    numbers = [_FIRST << power for power in range(10)] + [_FIRST >> power for power in range(1, 4)]
    return next((offer for offer in map(kind.at, numbers) if offer is not None), None)


def _hopeless(goal: Goal, kind: Kind, best: Offer | None) -> str:
    """Return the reason why no number of a kind can be better than the best offer so far; empty if one might be."""
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
    """Say that the last of some offers is far more expensive than the best one of other kinds; empty if it is not."""
    if best is None or not offers:
        return ""
    last = offers[-1]
    if last.usd is None or best.usd is None or last.usd <= _DEAR * best.usd:
        return ""
    days = rounded_text(last.days)
    return f"{_cost(last)} in {days} days on {last.cluster.count:,}, far from the best and not explored further"


def _how_close(goal: Goal, offers: Sequence[Offer]) -> str:
    if not offers:
        return "no layout of the model fits"
    fastest = min(offers, key=lambda offer: offer.days)
    cheapest = min(offers, key=lambda offer: offer.price)
    words = []
    if goal.days is not None:
        words.append(f"the fastest is {fastest.cluster.name} with {rounded_text(fastest.days)} days")
    if goal.usd is not None:
        days = rounded_text(cheapest.days)
        words.append(f"the cheapest is {cheapest.cluster.name} with {_cost(cheapest)} in {days} days")
    return "; ".join(words)


def _cost(offer: Offer) -> str:
    return "no known price" if offer.usd is None else f"{offer.usd:,.0f} USD"
