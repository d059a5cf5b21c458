"""Plans of one model on several clusters: made, ordered, compared.

PlanQuestion --compare_clusters: resolve, plan each--> ClusterComparison: plans, best first,
and why others are impossible
plans -> days, USD, GiB of every layout -> Pareto front -> sentences: fastest, cheapest, too close to tell
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hlat.hardware import parse_cluster
from hlat.planner.cost.calibration import ratio_between, undecided_ratio
from hlat.planner.expected import outlook
from hlat.planner.plan import TrainingPlan, fits, make_plan
from hlat.planner.problem.layouts import parse_layout
from hlat.planner.problem.question import PlanQuestion, RankBy
from hlat.planner.problem.request import resolve_request
from hlat.planner.report.explanation import cost_parts, price_origin
from hlat.planner.search import LayoutPrediction, predict_layout
from hlat.runtime.errors import PlanError


def pareto_indices(points: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the points that no other beats (smaller is better in every term); of equal points all."""
    return [
        index
        for index, point in enumerate(points)
        if not any(
            all(a <= b for a, b in zip(other, point, strict=True)) and tuple(other) != tuple(point) for other in points
        )
    ]


def pareto_front_of_plans(plans: Sequence[TrainingPlan]) -> list[tuple[TrainingPlan, LayoutPrediction]]:
    """Layouts of all plans that no other beats in time, cost and memory at once; fastest first."""
    every = [
        (plan, prediction)
        for plan in plans
        for prediction in (plan.ranked or (plan.chosen,))
        if fits(plan.request, prediction)
    ]
    # An unknown price would beat every known one: cost is then ignored.
    priced = all(prediction.cost_usd is not None for _, prediction in every)
    points = [
        (prediction.days, prediction.cost_usd or 0.0 if priced else 0.0, prediction.peak_memory)
        for _, prediction in every
    ]
    return sorted((every[index] for index in pareto_indices(points)), key=lambda pair: pair[1].days)


def rank_plans(plans: Sequence[TrainingPlan], by: RankBy) -> list[TrainingPlan]:
    """Order plans of several clusters, best first. By cost, plans without a price come last."""
    if by == "time":
        return sorted(plans, key=lambda plan: plan.chosen.days)
    return sorted(plans, key=lambda plan: (plan.chosen.cost_usd is None, plan.chosen.cost_usd or plan.chosen.days))


def plans_as_json(plans: Sequence[TrainingPlan]) -> list[dict[str, Any]]:
    """Plans under their documented keys, with ``on_front`` for each layout on the Pareto front of all plans.

    Each layout has the parts of its cost too.
    """
    # By identity: predictions hold dictionaries, so they have no hash.
    front = {id(prediction) for _, prediction in pareto_front_of_plans(plans)}
    contents = []
    for plan in plans:
        content = plan.to_dict()
        content["assumptions"]["price_origin"] = price_origin(plan.request)
        for entry, stage in zip(content.get("stages", ()), plan.stages.values(), strict=True):
            entry.update(plans_as_json([stage])[0])
        entries = [content["chosen"], *content["alternatives"]]
        for prediction, entry in zip([plan.chosen, *plan.alternatives], entries, strict=True):
            entry |= {"on_front": id(prediction) in front, "cost_parts_usd": cost_parts(plan.request, prediction)}
        contents.append(content)
    return contents


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
    """True if the better of two plans is so in at least four of five cases, by what is known of the model's errors."""
    ratio = _ratio(one, other, by)
    return max(ratio, 1 / ratio) >= _least_ratio(one, other)


def _ratio(one: TrainingPlan, other: TrainingPlan, by: RankBy) -> float:
    """Return days or USD of one plan over those of another, as predicted."""
    better, worse = (plan.chosen.days if by == "time" else plan.chosen.cost_usd or 0.0 for plan in (one, other))
    return better / worse


def _least_ratio(one: TrainingPlan, other: TrainingPlan) -> float:
    # Plans on chips of one family share the errors of that family; those of two families are taken as independent.
    same = one.request.cluster.chip.family == other.request.cluster.chip.family
    return undecided_ratio() if same else ratio_between(one.chosen.interval, other.chosen.interval)


def _close(best: TrainingPlan, plans: Sequence[TrainingPlan], by: RankBy) -> str:
    """Words that name the plans too close to the best to be told apart from it, and what the best is of each."""
    close = [plan for plan in plans if plan is not best and not told_apart(best, plan, by)]
    names = ", ".join(f"{plan.request.cluster.name} ({_share(best, plan, by)})" for plan in close)
    return f" Too close to tell apart: {names}." if close else ""


_WIDER = 1.2816 / 0.8416
"""Four of five cases are within 1.28 standard deviations to both sides, and below 0.84 to one side."""


def _share(best: TrainingPlan, other: TrainingPlan, by: RankBy) -> str:
    ratio, spread = _ratio(best, other, by), _least_ratio(best, other) ** _WIDER
    return f"{ratio:.0%} of it, {ratio / spread:.0%} to {ratio * spread:.0%} in 4 of 5 cases"


def _terms(plan: TrainingPlan) -> str:
    kind = plan.request.cluster.price(plan.request.price)
    return outlook(plan.chosen) + ("" if kind is None else f" ({kind[0]})")


@dataclass(frozen=True)
class ClusterComparison:
    """Plans of one model on several clusters."""

    plans: tuple[TrainingPlan, ...]  # one per cluster on which a layout fits, best first if an order was asked for
    refused: dict[str, str] = field(default_factory=dict)  # reason why there is no plan, by cluster
    # Prediction of the layout to compare with, if given, by cluster.
    against: dict[str, LayoutPrediction] = field(default_factory=dict)

    def to_dict(self) -> list[dict[str, Any]]:
        """The plans under their documented keys (docs/planning.md), then the clusters without a plan."""
        errors = [{"cluster": name, "error": error} for name, error in self.refused.items()]
        return plans_as_json(self.plans) + errors


def compare_clusters(question: PlanQuestion) -> ClusterComparison:
    """Plan a run on each of the clusters of a question.

    Raises:
        PlanError: no cluster can be planned for, or the question has a mistake.
        HardwareError: a cluster is unknown, or the catalog is inconsistent.
        RecipeError: a recipe or config.json with mistakes.
    """
    by, unit, catalog = question.order, question.unit, question.catalog
    parsed = [parse_cluster(name, catalog, unit) for name in question.clusters]
    kind = question.price_kind(parsed)
    plans: list[TrainingPlan] = []
    refused: dict[str, str] = {}
    others: dict[str, LayoutPrediction] = {}
    for cluster in parsed:
        try:
            request = resolve_request(question, cluster, kind)
            if question.against:
                others[cluster.name] = predict_layout(request, parse_layout(question.against, request, "--against"))
            plans.append(make_plan(request, question.layout))
        except PlanError as error:
            refused[cluster.name] = str(error)
    if not plans:
        raise PlanError("\n".join(dict.fromkeys(refused.values())))
    return ClusterComparison(tuple(rank_plans(plans, by) if by else plans), refused, others)
