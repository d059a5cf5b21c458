"""Tokens that a budget affords, of a model whose tokens nobody has fixed.

    model, budget, deadline or none --afford--> Purchase: the run of each kind of instance with most tokens

A run costs and takes as much per token with few tokens as with many. Without a deadline the number of instances is that
of a plan without a goal (the bend of the cost), and the budget says how many tokens. With one, all instances for the
whole time cost the budget: fewer would have too little time, more too little money. Such a number may be odd, and
layouts divide better by powers of two: the two around it are compared too.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from math import ceil, floor

from hlat.hardware import Catalog, Cluster, PriceKind
from hlat.planner.problem.request import PlanRequest
from hlat.planner.purchase.choice import Purchase, kinds_of, no_offer
from hlat.planner.purchase.exploration import explore, without_refusals
from hlat.planner.purchase.goal import Goal
from hlat.planner.purchase.offers import Kind, Offer

_DOUBLINGS = 6  # of a number that is too small for the model, and halvings of one too large for its batch


def afford(
    chips: str,
    goal: Goal,
    request_on: Callable[[Cluster, PriceKind | None], PlanRequest],
    catalog: Catalog,
    price: PriceKind | None = None,
) -> Purchase:
    """Choose kind and number of instances that train on most tokens.

    Args:
        chips: instances or chips of the catalog, separated by commas, or ``any``.
        goal: limits of the run; a budget is one of them.
        request_on: the request on a cluster, with prices of a kind. Its number of tokens has no influence.
        catalog: chips, instances and prices.
        price: kind of price; None for the one that most of the instances have.

    Raises:
        HardwareError: an unknown instance or chip; names all of them.
        PlanError: no price is known, or the model fits nowhere.
    """
    kinds, of, missed = kinds_of(chips, goal, request_on, catalog, price)
    if goal.days is None:
        found, others = explore(Goal(), kinds)
        missed |= others
        best = [(affordable(goal, offer), kind) for offer, kind in found]
    else:
        possible, others = without_refusals(kinds)
        missed |= others
        best = []
        for kind in possible:
            offers = [affordable(goal, offer) for offer in _for_all_the_time(goal, kind)]
            if offers:
                best.append((max(offers, key=lambda offer: offer.request.tokens), kind))
            else:
                missed[kind.instance.name] = "no layout of the model fits, on as many as the budget pays for"
    if not best:
        raise no_offer(f"no cluster can train the model, {goal}", missed)
    best.sort(key=lambda pair: -pair[0].request.tokens)
    sizes = [affordable(goal, offer) for offer in best[0][1].offers]
    chosen = best[0][0]
    sizes = [chosen if offer.cluster == chosen.cluster else offer for offer in sizes]
    return Purchase(goal, of, tuple(offer for offer, _ in best), tuple(sizes), missed, affords=True)


def affordable(goal: Goal, offer: Offer) -> Offer:
    """Return the run with as many tokens as budget and deadline allow, at least one step."""
    assert goal.usd is not None and offer.usd is not None, "a budget needs prices, which kinds_of looked for"
    share = goal.usd / offer.usd
    if goal.days is not None:
        share = min(share, goal.days / offer.days)
    return offer.with_tokens(max(int(share * offer.request.tokens), offer.request.tokens_per_step))


def _for_all_the_time(goal: Goal, kind: Kind) -> Sequence[Offer]:
    """Return offers of the numbers of instances that cost about the budget until the deadline, and of powers of two.

    If none of them is possible, it is the offer of the nearest power of two above, else below, that is.
    """
    assert goal.days is not None and goal.usd is not None, "there are a deadline and a budget"
    price = kind.cluster(1).price(kind.request_on(kind.cluster(1)).price)
    assert price is not None, "a budget needs prices, which kinds_of looked for"
    number = goal.usd / (price[1] * 24 * goal.days)
    below, above = max(1, floor(number)), max(1, ceil(number))
    power = 1 << (below.bit_length() - 1)
    near = sorted({below, above, power, 2 * power})
    offers = [offer for offer in map(kind.at, near) if offer is not None]
    if offers:
        return offers
    far = [2 * power << more for more in range(1, _DOUBLINGS)] + [power >> less for less in range(1, _DOUBLINGS)]
    return list(islice((offer for offer in map(kind.at, filter(None, far)) if offer is not None), 1))
