"""Plans: layout, time, memory and cost of a run before anything is started."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
) -> "TrainingPlan":
    """Choose the layout of a run on a cluster, and predict its time, memory, cost and goodput.

    Args:
        model: a preset, a config.json or its folder, a recipe file, or the name of a shipped recipe.
        cluster: INSTANCE:N, as in "trn1.32xlarge:64".
        tokens: tokens of the whole run; None for the recipe's, or 20 per parameter.
        sequence: tokens per sequence; None for the recipe's, or the model's maximum up to 8,192.
        global_batch: sequences per step; None for the recipe's, or about 4 million tokens.
        precision: precision mode; None for the recipe's, or "auto".
        price: kind of price: "on-demand", "capacity-block", "reserved", "spot" or "own"; None for the first known one.
        layout: layout to predict, as in "tp=8,pp=1,zero=1"; None searches for the best one.
        hardware: file with a catalog of chips and instances, on top of the one that ships with hlat.

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
    )
