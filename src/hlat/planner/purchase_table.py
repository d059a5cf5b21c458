"""A purchase as lines for a terminal, and as JSON values.

    Purchase --purchase_lines--> kinds of instances, sizes of the chosen kind, its risk, kinds that miss the goal
             --purchase_json---> the same under documented keys
    ModelSize --model_size_lines, model_size_json--> the same for the question which model to train

The risk: a run that meets the goal as predicted may miss it within the range of its prediction.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from hlat.model import count_parameters
from hlat.planner.expected import interval_text, median_days, median_energy, median_usd
from hlat.planner.offers import Offer
from hlat.planner.plan import layout_json, make_plan
from hlat.planner.problem.devices import comparison_note, why_not_runnable
from hlat.planner.problem.layouts import layout_text
from hlat.planner.problem.loss_law import PlannedLoss, forecast_json
from hlat.planner.purchase import ModelSize, Purchase, SizedRun, missed_by_reason, optimal_tokens
from hlat.planner.report.explanation import (
    cost_parts,
    cost_sentence,
    energy_sentence,
    expectation,
    price_origin,
    price_sentence,
    storage_sentence,
)
from hlat.planner.report.terminal import table_lines
from hlat.runtime.quantities import rounded_text, short_count, usd_text
from hlat.runtime.terminal import wrapped


def purchase_lines(purchase: Purchase, columns: int) -> Iterator[str]:
    """Yield the table of kinds, that of numbers of the chosen kind, and the kinds that miss the goal."""
    request = purchase.chosen.request
    tokens = "tokens as the budget affords" if purchase.affords else f"{short_count(request.tokens)} tokens"
    yield f"{request.name}, {tokens}, precision {request.mode}, {_prices(purchase.price, purchase.rows)}"
    yield f"goal: {purchase.goal}"
    yield ""
    yield from table_lines(list(_offer_rows(purchase.rows, purchase.chosen, purchase.affords)), columns)
    if len(purchase.sizes) > 1:
        yield ""
        yield f"{purchase.chosen.cluster.instance.name} by number of instances:"
        first = [purchase.chosen, *(offer for offer in purchase.sizes if offer is not purchase.chosen)]
        yield from table_lines(list(_offer_rows(first, purchase.chosen, purchase.affords)), columns)
    yield ""
    risk = risk_sentence(purchase)
    if risk:
        yield from wrapped(f"! {risk}", columns, 2)
    yield from _marks(purchase.rows, purchase.missed, columns)
    if purchase.affords:
        yield from wrapped(_beside_the_optimum(purchase.chosen), columns, 2)
    yield from _assumed(purchase.rows, request.loss, columns)


def model_size_lines(found: ModelSize, columns: int) -> Iterator[str]:
    """Yield the table of sizes and what it rests on."""
    chosen = found.runs[0]
    what = _flops(found.flops) if found.flops is not None else f"${found.goal.usd:,.0f}"
    until = "" if found.goal.days is None else f", done in {found.goal.days:g} day{'' if found.goal.days == 1 else 's'}"
    yield f"Which model for {what}{until}, {_prices(found.price, [found.chosen])}"
    yield ""
    # A narrow terminal has no place for both; who looks at a range can divide.
    loss = ["loss", _LOSS_RANGE] if chosen.forecast else ["D/N", "loss"]
    heads = ["", "size", "tokens", *loss, "cluster", "days", "4 of 5", "cost", "best for"]
    rows = [_size_row(run, run is chosen) for run in found.runs]
    yield from table_lines([heads, *rows], columns)
    yield ""
    for run in found.runs:
        yield from wrapped(_shape(run, found.generated), columns, 2)
    yield from wrapped(chosen.law.source, columns, 2)
    yield from _marks([chosen.offer], found.missed, columns)
    yield from _assumed([chosen.offer], chosen.forecast, columns)


_LOSS_RANGE = "range"  # head of the column of 4 of 5 runs of a loss, beside that of days


def _size_row(run: SizedRun, chosen: bool) -> list[str]:
    offer, forecast = run.offer, run.forecast
    return [
        "*" if chosen else "",
        short_count(run.parameters),
        short_count(run.tokens),
        *([] if forecast else [f"{run.tokens / run.parameters:,.0f}"]),
        f"{run.loss:.3f}",
        *([forecast.span] if forecast else []),
        offer.cluster.name,
        median_days(offer.prediction),
        interval_text(offer.prediction, offer.prediction.days),
        median_usd(offer.prediction),
        run.purpose,
    ]


def _flops(value: float) -> str:
    """FLOPs as --flops takes them, 1.2e22: nobody says 12 sextillion."""
    return f"{value:.3g} FLOPs".replace("e+", "e")


def _shape(run: SizedRun, generated: float) -> str:
    model = run.offer.request.model
    known = f", {run.size_range} in 4 of 5 fits" if run.size_range else ""
    life = f"; with generating, {_flops(run.lifetime_flops(generated))}" if generated else ""
    return (
        f"{run.offer.request.name}: {model.layers} layers of {model.hidden_size:,}, {model.heads} heads, "
        f"{model.n_kv_heads} kv heads, {model.intermediate_size:,} wide, {model.vocab_size:,} words; "
        f"{_flops(run.flops)}, for which the law wants {short_count(run.best.parameters)} parameters{known}{life}"
    )


def _beside_the_optimum(offer: Offer) -> str:
    """Compare the tokens of a run with those for which its model has the best size."""
    request = offer.request
    law, size, wanted = request.asked.law, count_parameters(request.model).total, optimal_tokens(request)
    share, loss = request.tokens / wanted, law.loss(request.model, request.sequence, request.tokens)
    flops = law.flops(request.model, request.sequence, request.tokens)
    best, span = law.best_size(flops, 0.0, request.sequence), law.size_range(flops, 0.0, request.sequence)
    if span and not span.is_determined:
        return f"The ladder does not determine the best size for this compute: {span} parameters in 4 of 5 fits."
    return (
        f"{short_count(request.tokens)} tokens are {rounded_text(request.tokens / size)} per parameter, "
        f"{rounded_text(share, 2)} times those for which this size is compute-optimal ({short_count(wanted)}). "
        f"The same compute is best spent on {short_count(best.parameters)} parameters and {short_count(best.tokens)} "
        f"tokens: loss {best.loss:.3f} instead of {loss:.3f} ({law.source})."
    )


def _marks(offers: Sequence[Offer], missed: dict[str, str], columns: int) -> Iterator[str]:
    for name, note in {offer.cluster.instance.name: comparison_note(offer.request) for offer in offers}.items():
        if note:
            yield from wrapped(f"! {name}: {note}", columns, 2)
    for names, reason in missed_by_reason(missed):
        yield from wrapped(f"not {names}: {reason}", columns, 4)


def _assumed(offers: Sequence[Offer], loss: PlannedLoss | None, columns: int) -> Iterator[str]:
    """Yield what the first offer rests on, its loss, and the price of each that has a quote of its own."""
    offer = offers[0]
    for one in offer.request.assumed:
        # The tokens are the answer here, not an assumption: the budget or the law chose them.
        if not (offer.request.tokens_assumed and "(--tokens)" in one):
            yield from wrapped(f"assumed  {one}", columns, 9)
    yield from wrapped(f"expect   {expectation(offer.request, offer.prediction)}", columns, 9)
    for subject, sentence in loss.facts(offer.usd) if loss else ():
        yield from wrapped(f"{subject:<8} {sentence}", columns, 9)
    for each in offers:
        if each is offer or price_origin(each.request):
            name = f"{each.cluster.name}: " if len(offers) > 1 else ""
            yield from wrapped(f"price    {name}{price_sentence(each.request)}", columns, 9)
            if cost := cost_sentence(each.request, each.prediction):
                yield from wrapped(f"cost     {name}{cost}", columns, 9)
    yield from wrapped(f"energy   {energy_sentence(offer.request, offer.prediction)}", columns, 9)
    yield from wrapped(f"saves    {storage_sentence(offer.request, offer.prediction)}", columns, 9)


def _prices(kind: str | None, offers: Sequence[Offer]) -> str:
    if kind is None and any(offer.usd is not None for offer in offers):
        return "each at its first kind of price (--price names one for all)"
    return "prices unknown" if kind is None else f"{kind} prices"


def _offer_rows(offers: Sequence[Offer], chosen: Offer, affords: bool) -> Iterator[list[str]]:
    # Runs of unlike tokens have unlike losses, which take the place of chips and energy in a narrow terminal.
    losses = [offer.request.loss if affords else None for offer in offers]
    last = ["loss", _LOSS_RANGE] if losses[0] else ["energy"]
    chips = [] if losses[0] else ["chips"]
    yield ["", "cluster", *chips, *(["tokens"] * affords), "days", "4 of 5", "cost", *last, "layout"]
    for offer, loss in zip(offers, losses, strict=True):
        yield [
            "*" if offer is chosen else "",
            offer.cluster.name,
            *([] if loss else [f"{offer.cluster.chips:,}"]),
            *([short_count(offer.request.tokens)] * affords),
            median_days(offer.prediction),
            interval_text(offer.prediction, offer.prediction.days),
            median_usd(offer.prediction),
            *([f"{loss.range.loss:.3f}", loss.span] if loss else [median_energy(offer.prediction)]),
            layout_text(offer.prediction.candidate),
        ]


def purchase_json(purchase: Purchase) -> dict[str, Any]:
    """Return the purchase under its documented keys (docs/planning.md), as JSON values."""
    return {
        "model": purchase.chosen.request.name,
        "tokens": purchase.chosen.request.tokens,
        "tokens_affordable": purchase.affords,
        "deadline_days": purchase.goal.days,
        "budget_usd": purchase.goal.usd,
        "price_kind": purchase.price,
        "chosen": _offer_json(purchase.chosen),
        "rows": [_offer_json(offer) for offer in purchase.rows],
        "sure": [offer.cluster.name for offer in purchase.sure],
        "sizes": [_offer_json(offer) for offer in purchase.sizes],
        "missed": purchase.missed,
    }


def model_size_json(found: ModelSize) -> dict[str, Any]:
    """Return the answer under its documented keys (docs/planning.md), as JSON values."""
    return {
        "deadline_days": found.goal.days,
        "budget_usd": found.goal.usd,
        "flops": found.flops,
        "generated_tokens": found.generated,
        "price_kind": found.price,
        "runs": [
            {
                "best_for": run.purpose,
                "model": run.offer.request.name,
                "shape": run.offer.request.model.model_dump(mode="json", exclude_defaults=True),
                "parameters": run.parameters,
                "tokens": run.tokens,
                "loss": run.loss,
                "flops": run.flops,
                "law_parameters": run.best.parameters,
                "law_tokens": run.best.tokens,
                **({"law_parameters_interval": run.size_range[:2]} if run.size_range else {}),
                **forecast_json(run.forecast),
                "run": _offer_json(run.offer),
            }
            for run in found.runs
        ],
        "missed": found.missed,
    }


def _offer_json(offer: Offer) -> dict[str, Any]:
    return {
        "cluster": offer.cluster.name,
        "instances": offer.cluster.count,
        "chips": offer.cluster.chips,
        "tokens": offer.request.tokens,
        "for_comparison": why_not_runnable(offer.cluster.chip, offer.request.mode) or None,
        "price_origin": price_origin(offer.request),
        **forecast_json(offer.request.loss),
        **layout_json(offer.request, offer.prediction),
        "cost_parts_usd": cost_parts(offer.request, offer.prediction),
    }


def risk_sentence(purchase: Purchase) -> str:
    """Say that the chosen run may miss the goal, and what would not; empty if its whole range meets it."""
    chosen, goal = purchase.chosen, purchase.range_goal
    late = goal.days is not None and chosen.slow_end.days > goal.days
    dear = goal.usd is not None and (chosen.slow_end.usd or 0.0) > goal.usd
    if not (late or dear):
        return ""
    limits = " and ".join(["deadline"] * late + ["budget"] * dear)
    planned = chosen.prediction
    ranges = [f"{interval_text(planned, planned.days)} days"] * late
    if dear and planned.cost_usd is not None:
        ranges.append(interval_text(planned, planned.cost_usd, lambda usd: usd_text(usd, 2)))
    may = f"{chosen.cluster.name} may miss the {limits}: {' and '.join(ranges)} in 4 of 5 runs. "
    sure = (
        offer.cluster.name
        for offer in purchase.sure
        if purchase.range_goal.meets(Offer(offer.request, make_plan(offer.request).chosen).slow_end)
    )
    if names := ", ".join(islice(sure, _NAMED)):
        return may + f"Within the goal over the whole range: {names}."
    none = f"No number of {chosen.cluster.instance.name} that was tried is within the goal over its whole range"
    return may + (f"{none}; --deadline {purchase.roomy} leaves room." if purchase.roomy else f"{none}.")


_NAMED = 3  # clusters in a sentence: the cheapest
