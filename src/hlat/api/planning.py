"""Plans: layout, time, memory and cost of a run before anything is started."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hlat.planner.purchase import Purchase
    from hlat.planner.report import ClusterComparison
    from hlat.planner.search import TrainingPlan


def plan(
    model: str | Path,
    cluster: str,
    *,
    tokens: int | None = None,
    sequence: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    price: str | None = None,
    layout: str | None = None,
    hardware: str | Path | None = None,
    per: str | None = None,
    interruptions: float | None = None,
    prices_of: str | None = None,
) -> "TrainingPlan":
    """Choose the layout of a run on a cluster, and predict its time, memory, cost and goodput.

    Args:
        model: a preset, a config.json or its folder, a recipe file, or the name of a shipped recipe.
        cluster: INSTANCE:N, as in "trn1.32xlarge:64".
        tokens: tokens of the whole run; None for the recipe's, or 20 per parameter.
        sequence: tokens per sequence; None for the recipe's, or the model's maximum up to 8,192.
        global_batch: sequences per step; None for the recipe's, or about 4 million tokens.
        precision: precision mode; None for the recipe's, or "auto".
        price: kind of price, "on-demand", "capacity-block", "reserved", "spot" or "own"; or a quote in USD per hour,
            "2.10/h" of a chip or "16.80/instance-h"; None for the first known kind.
        layout: layout to predict, as in "tp=8,pp=1,zero=1"; None searches for the best one.
        hardware: file with a catalog of chips and instances, on top of the one that ships with hlat.
        per: unit of N in ``cluster``: "instance" (None too) or "chip", which also takes a part of one instance.
        interruptions: interruptions per instance and day, as of spot instances; None for the catalog's failures.
        prices_of: month whose prices are used, as in "2024-04"; None for today's.

    Returns:
        The plan: ``chosen`` and ``alternatives`` (each with ``candidate``, ``step_seconds``, ``peak_memory`` in bytes,
        ``days``, ``cost_usd``, ``mfu``, ``goodput``), ``request``, and ``to_dict()`` with everything as JSON values.

    Raises:
        PlanError: nothing fits, or an argument is wrong; the message suggests what would work.
        HardwareError: the cluster is unknown, or the catalog is inconsistent.
        RecipeError: the recipe or config.json has mistakes.
    """
    found = compare_plans(
        model,
        [cluster],
        tokens=tokens,
        sequence=sequence,
        global_batch=global_batch,
        precision=precision,
        price=price,
        layout=layout,
        hardware=hardware,
        per=per,
        interruptions=interruptions,
        prices_of=prices_of,
    )
    return found.plans[0]


def compare_plans(
    model: str | Path,
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
    hardware: str | Path | None = None,
    per: str | None = None,
    interruptions: float | None = None,
    prices_of: str | None = None,
) -> "ClusterComparison":
    """Plan a run on each of several clusters; ``plan`` explains the arguments that both have.

    Args:
        model: as for ``plan``.
        clusters: INSTANCE:N each.
        tokens: as for ``plan``.
        sequence: as for ``plan``.
        global_batch: as for ``plan``.
        precision: as for ``plan``.
        price: as for ``plan``; None for the first kind that all clusters have.
        rank_by: "time" or "cost" orders the plans; None keeps the order of ``clusters``.
        layout: as for ``plan``.
        against: another layout whose prediction is to be compared.
        hardware: as for ``plan``.
        per: as for ``plan``.
        interruptions: as for ``plan``.
        prices_of: as for ``plan``.

    Returns:
        ``plans``, ``refused`` (the reason, by cluster without a plan), ``against`` (a prediction by cluster), and
        ``to_dict()`` with everything as JSON values.

    Raises:
        PlanError: no cluster can be planned for, or an argument is wrong.
        HardwareError: a cluster is unknown, or the catalog is inconsistent.
        RecipeError: the recipe or config.json has mistakes.
    """
    from hlat.planner.report import compare_clusters

    return compare_clusters(
        str(model),
        clusters,
        tokens=tokens,
        sequence=sequence,
        global_batch=global_batch,
        precision=precision,
        price=price,
        rank_by=rank_by,
        layout=layout,
        against=against,
        hardware=None if hardware is None else Path(hardware),
        per=per,
        interruptions=interruptions,
        prices_of=prices_of,
    )


def choose_cluster(
    model: str | Path,
    *,
    chips: str = "any",
    deadline: str | None = None,
    budget: str | None = None,
    tokens: int | None = None,
    sequence: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    price: str | None = None,
    hardware: str | Path | None = None,
    interruptions: float | None = None,
    prices_of: str | None = None,
) -> "Purchase":
    """Choose kind and number of instances for a run, by a deadline, a budget, or both.

    With a deadline it is the cheapest cluster that meets it, with a budget alone the fastest within it, without either
    the largest one whose run costs at most 10 % more than the cheapest of its kind.

    Args:
        model: as for ``plan``.
        chips: instances or chips of the catalog, separated by commas, or "any" for all instances with a price.
        deadline: longest duration of the run, failures and saves included, as in "36h", "14d" or "2w".
        budget: highest cost of the run in USD, as in "50000" or "50k".
        tokens: as for ``plan``.
        sequence: as for ``plan``.
        global_batch: as for ``plan``.
        precision: as for ``plan``.
        price: as for ``plan``; None for the kind that most of the instances have.
        hardware: as for ``plan``.
        interruptions: as for ``plan``.
        prices_of: as for ``plan``.

    Returns:
        ``rows``, the best offer of each kind of instance that meets the goal, the ``chosen`` one first; ``sizes``, the
        numbers of instances that were computed for that kind; ``missed``, the reason by kind without an offer. An offer
        has ``cluster``, ``days``, ``usd`` and ``prediction``.

    Raises:
        PlanError: no cluster meets the goal, or an argument is wrong.
        HardwareError: an instance is unknown, or the catalog is inconsistent.
        RecipeError: the recipe or config.json has mistakes.
    """
    from hlat.hardware import OWN, load_catalog, parse_quote, with_prices_of, with_quote
    from hlat.planner.problem import resolve_request
    from hlat.planner.purchase import choose_cluster as choose
    from hlat.planner.purchase import parse_goal
    from hlat.planner.report import price_kind

    goal, quote = parse_goal(deadline, budget), parse_quote(price)
    priced = with_prices_of(load_catalog(None if hardware is None else str(hardware)), prices_of)
    catalog = with_quote(priced, quote, interruptions)
    kind = price_kind(price if quote is None else OWN, [])
    numbers = {"tokens": tokens, "sequence": sequence, "global_batch": global_batch}
    return choose(
        chips,
        goal,
        lambda cluster, of: resolve_request(str(model), cluster, mode=precision, price=of, **numbers),
        catalog,
        kind,
    )
