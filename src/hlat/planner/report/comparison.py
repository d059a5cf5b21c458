"""Several layouts, or several clusters, side by side: which of them nothing else beats, the fastest, the cheapest.

Plans -> days, dollars, GiB of every layout -> the Pareto front -> sentences
"""

from collections.abc import Sequence
from typing import Any, Literal

from hlat.hardware import Cluster, PriceKind
from hlat.planner.search import LayoutPrediction, TrainingPlan, fits

RankBy = Literal["time", "cost"]


def pareto_front(points: Sequence[Sequence[float]]) -> list[int]:
    """Which of these points no other is better than: as good in everything, and better in something.

    Args:
        points: costs in several terms, of which less is better; all of one length.

    Returns:
        Their indices, in order. Of equal points all are on the front.
    """
    return [
        index
        for index, point in enumerate(points)
        if not any(
            all(a <= b for a, b in zip(other, point, strict=True)) and tuple(other) != tuple(point) for other in points
        )
    ]


def pareto_front_of_plans(plans: Sequence[TrainingPlan]) -> list[tuple[TrainingPlan, LayoutPrediction]]:
    """The layouts of all plans that no other beats in time, cost and memory at once; fastest first.

    Where the price of one cluster is not known, cost does not count.
    """
    every = [(plan, one) for plan in plans for one in (plan.ranked or (plan.chosen,)) if fits(plan.request, one)]
    priced = all(one.cost_usd is not None for _, one in every)
    points = [(one.days, one.cost_usd or 0.0 if priced else 0.0, one.peak_memory) for _, one in every]
    return sorted((every[index] for index in pareto_front(points)), key=lambda pair: pair[1].days)


def rank_plans(plans: Sequence[TrainingPlan], by: RankBy) -> list[TrainingPlan]:
    """Plans of several clusters, best first. Those without a price come last where cost ranks."""
    if by == "time":
        return sorted(plans, key=lambda plan: plan.chosen.days)
    return sorted(plans, key=lambda plan: (plan.chosen.cost_usd is None, plan.chosen.cost_usd or plan.chosen.days))


def plans_as_json(plans: Sequence[TrainingPlan]) -> list[dict[str, Any]]:
    """The documented keys of every plan, and of every layout whether it is on the front of all of them."""
    front = {id(one) for _, one in pareto_front_of_plans(plans)}
    contents = []
    for plan in plans:
        content = plan.as_json()
        entries = [content["chosen"], *content["alternatives"]]
        for one, entry in zip([plan.chosen, *plan.alternatives], entries, strict=True):
            entry["on_front"] = id(one) in front
        contents.append(content)
    return contents


def common_price_kind(clusters: Sequence[Cluster]) -> PriceKind | None:
    """A kind of price that is known of all these clusters; None where there is none."""
    kinds = [list(cluster.instance.prices) for cluster in clusters]
    return next((kind for kind in kinds[0] if all(kind in others for others in kinds)), None) if kinds else None


def comparison_lines(plans: Sequence[TrainingPlan]) -> list[str]:
    """What several clusters differ in, in words."""
    if len(plans) < 2:
        return []
    fastest = rank_plans(plans, "time")[0]
    lines = [f"Fastest: {fastest.request.cluster.name}, {_terms(fastest)}."]
    priced = [plan for plan in plans if plan.chosen.cost_usd is not None]
    if priced:
        cheapest = rank_plans(priced, "cost")[0]
        lines.append(f"Cheapest: {cheapest.request.cluster.name}, {_terms(cheapest)}.")
    kinds = {price[0] for plan in priced if (price := plan.request.cluster.price(plan.request.price)) is not None}
    if len(kinds) > 1:
        lines.append(f"These prices are of different kinds: {', '.join(sorted(kinds))}. --price asks for one of them.")
    if unpriced := [plan.request.cluster.name for plan in plans if plan not in priced]:
        lines.append(f"No price is known of {', '.join(unpriced)}.")
    return lines


def _terms(plan: TrainingPlan) -> str:
    kind = plan.request.cluster.price(plan.request.price)
    price = "" if kind is None else f" and {plan.chosen.cost_usd:,.0f} USD ({kind[0]})"
    return f"{plan.chosen.days:,.1f} days{price}"
