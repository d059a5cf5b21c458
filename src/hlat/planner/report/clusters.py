"""Plans of one model on several clusters.

model, INSTANCE:N ... --resolve, plan each--> ClusterComparison: plans, best first, and why others are impossible
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from hlat.hardware import (
    OWN,
    Cluster,
    Per,
    PriceKind,
    load_catalog,
    parse_cluster,
    parse_quote,
    parse_site,
    with_prices_of,
    with_quote,
)
from hlat.planner.problem.layout_text import parse_layout
from hlat.planner.problem.request import resolve_request
from hlat.planner.report.comparison import RankBy, common_price_kind, plans_as_json, rank_plans
from hlat.planner.search.plan import TrainingPlan, make_plan
from hlat.planner.search.search import LayoutPrediction, predict_layout
from hlat.runtime.errors import PlanError


@dataclass(frozen=True)
class ClusterComparison:
    """Plans of one model on several clusters.

    Attributes:
        plans: one plan per cluster on which a layout fits, best first if an order was asked for.
        refused: by cluster, the reason why there is no plan.
        against: by cluster, the prediction of the layout to compare with, if one was given.
    """

    plans: tuple[TrainingPlan, ...]
    refused: dict[str, str] = field(default_factory=dict)
    against: dict[str, LayoutPrediction] = field(default_factory=dict)

    def to_dict(self) -> list[dict[str, Any]]:
        """The plans under their documented keys (docs/planning.md), then the clusters without a plan."""
        errors = [{"cluster": name, "error": error} for name, error in self.refused.items()]
        return plans_as_json(self.plans) + errors


def compare_clusters(
    model: str,
    clusters: Sequence[str],
    *,
    tokens: int | None = None,
    sequence: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    price: str | None = None,
    rank_by: str | None = None,
    layout: str | None = None,
    against: str | None = None,
    hardware: Path | None = None,
    per: str | None = None,
    interruptions: float | None = None,
    prices_of: str | None = None,
    storage: str | None = None,
    pue: float | None = None,
) -> ClusterComparison:
    """Plan a run on each of some clusters.

    Args:
        model: a preset, a config.json or its folder, a recipe file, or the name of a shipped recipe.
        clusters: INSTANCE:N each, as in trn1.32xlarge:64.
        tokens: tokens of the whole run.
        sequence: tokens per sequence.
        global_batch: sequences per step.
        precision: precision mode, as in a recipe.
        price: kind of price, or a quote such as 2.10/h; None for the first kind that all clusters have.
        rank_by: "time" or "cost" orders the plans; None keeps the order of the clusters.
        layout: layout to predict, as in tp=8,pp=1,zero=1; None searches for the best one.
        against: layout whose prediction is to be compared.
        hardware: a catalog of chips and instances, on top of the one that ships with hlat.
        per: unit of N, "instance" (the default) or "chip".
        interruptions: per instance and day, instead of the catalog's failures.
        prices_of: month whose prices are used, as in 2024-04; None for today's.
        storage: rate of the file system, as in 5GB/s; None for an assumed one.
        pue: power usage effectiveness; None for a usual one.

    Raises:
        PlanError: no cluster can be planned for, or an argument is wrong.
        HardwareError: a cluster is unknown, or the catalog is inconsistent.
        RecipeError: a recipe or config.json with mistakes.
    """
    by, site = parse_rank_by(rank_by), parse_site(storage, pue)
    quote, unit = parse_quote(price), parse_per(per)
    priced = with_prices_of(load_catalog(None if hardware is None else str(hardware)), prices_of)
    catalog = with_quote(priced, quote, interruptions)
    parsed = [parse_cluster(name, catalog, unit) for name in clusters]
    kind = price_kind(price if quote is None else OWN, parsed)
    plans: list[TrainingPlan] = []
    refused: dict[str, str] = {}
    others: dict[str, LayoutPrediction] = {}
    for cluster in parsed:
        try:
            request = resolve_request(
                model,
                cluster,
                mode=precision,
                price=kind,
                tokens=tokens,
                sequence=sequence,
                global_batch=global_batch,
                site=site,
            )
            if against:
                others[cluster.name] = predict_layout(request, parse_layout(against, request, "--against"))
            plans.append(make_plan(request, layout))
        except PlanError as error:
            refused[cluster.name] = str(error)
    if not plans:
        raise PlanError("\n".join(dict.fromkeys(refused.values())))
    return ClusterComparison(tuple(rank_plans(plans, by) if by else plans), refused, others)


def parse_per(text: str | None) -> Per:
    """Return the unit of numbers of machines that a text names. Raises PlanError if there is no such unit."""
    choices: tuple[Per, ...] = get_args(Per)
    for known in choices:
        if text == known:
            return known
    if text is None:
        return "instance"
    raise PlanError(f"--per {text}: the N of INSTANCE:N counts instances or chips: --per instance or --per chip")


def parse_rank_by(text: str | None) -> RankBy | None:
    """Return the order of clusters that a text names. Raises PlanError if clusters are not ordered by this."""
    choices: tuple[RankBy, ...] = get_args(RankBy)
    for known in choices:
        if text == known:
            return known
    if text is None:
        return None
    raise PlanError(f"--rank-by {text}: clusters are ordered by time or by cost")


def price_kind(text: str | None, clusters: Sequence[Cluster]) -> PriceKind | None:
    """Return the kind of price to compare clusters in: the named one, or the first that all of them have.

    Raises:
        PlanError: there is no such kind.
    """
    kinds: tuple[PriceKind, ...] = get_args(PriceKind)
    for known in kinds:
        if text == known:
            return known
    if text is not None:
        raise PlanError(
            f"--price {text}: a price is one of {', '.join(kinds)}, or a quote in USD per hour: 2.10/h (of a chip) or "
            "16.80/instance-h"
        )
    return common_price_kind(clusters) if len(clusters) > 1 else None
