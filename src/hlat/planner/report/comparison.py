"""Comparison of layouts and clusters: Pareto front, fastest, cheapest.

plans -> days, USD, GiB of every layout -> Pareto front -> sentences
"""

from collections.abc import Sequence
from typing import Any, Literal

from hlat.hardware import Cluster, PriceKind
from hlat.planner.cost.ratio_interval import ratio_between, undecided_ratio
from hlat.planner.search.plan import TrainingPlan, fits
from hlat.planner.search.search import LayoutPrediction

RankBy = Literal["time", "cost"]


def pareto_indices(points: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the points that no other point dominates (at most as large in every term, smaller in one).

    Args:
        points: points of equal length; smaller is better in every term.

    Returns:
        Indices in ascending order. Of equal points all are returned.
    """
    return [
        index
        for index, point in enumerate(points)
        if not any(
            all(a <= b for a, b in zip(other, point, strict=True)) and tuple(other) != tuple(point) for other in points
        )
    ]


def pareto_front_of_plans(plans: Sequence[TrainingPlan]) -> list[tuple[TrainingPlan, LayoutPrediction]]:
    """Layouts of all plans that no other beats in time, cost and memory at once; fastest first.

    If the price of a cluster is unknown, cost is ignored.
    """
    every = [
        (plan, prediction)
        for plan in plans
        for prediction in (plan.ranked or (plan.chosen,))
        if fits(plan.request, prediction)
    ]
    priced = all(prediction.cost_usd is not None for _, prediction in every)
    points = [
        (prediction.days, prediction.cost_usd or 0.0 if priced else 0.0, prediction.peak_memory)
        for _, prediction in every
    ]
    return sorted((every[index] for index in pareto_indices(points)), key=lambda pair: pair[1].days)


def rank_plans(plans: Sequence[TrainingPlan], by: RankBy) -> list[TrainingPlan]:
    """Plans of several clusters, best first. By cost, plans without a price come last."""
    if by == "time":
        return sorted(plans, key=lambda plan: plan.chosen.days)
    return sorted(plans, key=lambda plan: (plan.chosen.cost_usd is None, plan.chosen.cost_usd or plan.chosen.days))


def plans_as_json(plans: Sequence[TrainingPlan]) -> list[dict[str, Any]]:
    """Plans under their documented keys, with ``on_front`` for each layout on the Pareto front of all plans."""
    front = {id(prediction) for _, prediction in pareto_front_of_plans(plans)}
    contents = []
    for plan in plans:
        content = plan.to_dict()
        entries = [content["chosen"], *content["alternatives"]]
        for prediction, entry in zip([plan.chosen, *plan.alternatives], entries, strict=True):
            entry["on_front"] = id(prediction) in front
        contents.append(content)
    return contents


def common_price_kind(clusters: Sequence[Cluster]) -> PriceKind | None:
    """First kind of price that the catalog has for all these clusters; None if there is none."""
    kinds = [list(cluster.instance.prices) for cluster in clusters]
    return next((kind for kind in kinds[0] if all(kind in others for others in kinds)), None) if kinds else None


def comparison_lines(plans: Sequence[TrainingPlan]) -> list[str]:
    """Sentences that compare several clusters; empty for one."""
    if len(plans) < 2:
        return []
    fastest = rank_plans(plans, "time")[0]
    lines = [f"Fastest: {fastest.request.cluster.name}, {_terms(fastest)}.{_close(fastest, plans, 'time')}"]
    priced = [plan for plan in plans if plan.chosen.cost_usd is not None]
    if priced:
        cheapest = rank_plans(priced, "cost")[0]
        lines.append(
            f"Cheapest: {cheapest.request.cluster.name}, {_terms(cheapest)}.{_close(cheapest, priced, 'cost')}"
        )
    kinds = {price[0] for plan in priced if (price := plan.request.cluster.price(plan.request.price)) is not None}
    if len(kinds) > 1:
        lines.append(f"Prices of different kinds are compared: {', '.join(sorted(kinds))}. Choose one with --price.")
    if unpriced := [plan.request.cluster.name for plan in plans if plan not in priced]:
        lines.append(f"No price is known for {', '.join(unpriced)}.")
    return lines


def told_apart(one: TrainingPlan, other: TrainingPlan, by: RankBy) -> bool:
    """True if the better of two plans is so in at least four of five cases, by what is known of the model's errors.

    Plans on chips of one family share the errors of that family; those of two families are taken as independent.
    """
    values = [plan.chosen.days if by == "time" else plan.chosen.cost_usd or 0.0 for plan in (one, other)]
    same = one.request.cluster.chip.family == other.request.cluster.chip.family
    least = undecided_ratio() if same else ratio_between(one.chosen.interval, other.chosen.interval)
    return max(values) >= min(values) * least


def _close(best: TrainingPlan, plans: Sequence[TrainingPlan], by: RankBy) -> str:
    """Words that name the plans too close to the best to be told apart from it."""
    close = [plan.request.cluster.name for plan in plans if plan is not best and not told_apart(best, plan, by)]
    return f" Too close to tell apart: {', '.join(close)}." if close else ""


def _terms(plan: TrainingPlan) -> str:
    """Duration and price of a plan."""
    kind = plan.request.cluster.price(plan.request.price)
    price = "" if kind is None else f" and {plan.chosen.cost_usd:,.0f} USD ({kind[0]})"
    return f"{plan.chosen.days:,.1f} days{price}"
