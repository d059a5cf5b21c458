"""A purchase as lines for a terminal of 80 columns, and as JSON values."""

from collections.abc import Iterator, Sequence
from typing import Any

from hlat.planner.problem import comparison_note, layout_text, why_not_runnable
from hlat.planner.purchase.choice import Purchase
from hlat.planner.purchase.offers import Offer
from hlat.planner.search import format_number, layout_json

_HEADER = f"  {'cluster':20} {'chips':>6} {'days':>7} {'USD':>11} {'goodput':>7}  layout"


def purchase_lines(purchase: Purchase) -> Iterator[str]:
    """Yield the table of kinds, that of numbers of the chosen kind, and the kinds that miss the goal."""
    request = purchase.chosen.request
    prices = "prices unknown" if purchase.price is None else f"{purchase.price} prices"
    yield f"{request.name}, {request.tokens:.3g} tokens, precision {request.mode}, {prices}"
    yield f"goal: {purchase.goal}"
    yield ""
    yield from _rows(purchase.rows, purchase.chosen)
    if len(purchase.sizes) > 1:
        yield ""
        yield f"{purchase.chosen.cluster.instance.name} by number of instances:"
        yield from _rows(purchase.sizes, purchase.chosen)
    for name, note in {offer.cluster.instance.name: comparison_note(offer.request) for offer in purchase.rows}.items():
        if note:
            yield f"! {name}: {note}"
    if purchase.missed:
        yield ""
    yield from (f"not {name}: {reason}" for name, reason in purchase.missed.items())


def _rows(offers: Sequence[Offer], chosen: Offer) -> Iterator[str]:
    yield _HEADER
    for offer in offers:
        cost = "" if offer.usd is None else f"{offer.usd:,.0f}"
        yield (
            f"{'*' if offer is chosen else ' '} {offer.cluster.name:20} {offer.cluster.chips:6,} "
            f"{format_number(offer.days, 1):>7} {cost:>11} {offer.prediction.goodput:7.1%}  "
            f"{layout_text(offer.prediction.candidate)}"
        )


def purchase_json(purchase: Purchase) -> dict[str, Any]:
    """Return the purchase under its documented keys (docs/planning.md), as JSON values."""
    return {
        "model": purchase.chosen.request.name,
        "tokens": purchase.chosen.request.tokens,
        "deadline_days": purchase.goal.days,
        "budget_usd": purchase.goal.usd,
        "price_kind": purchase.price,
        "chosen": _json(purchase.chosen),
        "rows": [_json(offer) for offer in purchase.rows],
        "sizes": [_json(offer) for offer in purchase.sizes],
        "missed": purchase.missed,
    }


def _json(offer: Offer) -> dict[str, Any]:
    return {
        "cluster": offer.cluster.name,
        "instances": offer.cluster.count,
        "chips": offer.cluster.chips,
        "for_comparison": why_not_runnable(offer.cluster.chip, offer.request.mode) or None,
        **layout_json(offer.request, offer.prediction),
    }
