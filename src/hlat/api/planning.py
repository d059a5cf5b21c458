"""Plans and ladders: layout, time, memory, cost and loss of a run before it is started."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.api.recipes import Overrides, checks_arguments, override_words
from hlat.planner import PlanQuestion, compare_clusters
from hlat.planner import choose_cluster as choose_cluster_for
from hlat.planner import choose_model_size as choose_model_size_for
from hlat.planner import plan_grid as plan_grid_for

if TYPE_CHECKING:
    from hlat.ladder import LadderReport
    from hlat.planner import ClusterComparison, ModelSize, PlanGrid, Purchase, TrainingPlan


@checks_arguments
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
    quotes: str | Path | None = None,
    storage: str | None = None,
    pue: float | None = None,
    network: str | None = None,
    search: bool = False,
    ladder: str | Path | None = None,
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
        quotes: CSV file of prices by cloud, region, instance and day, which replace those of the catalog
            (docs/planning.md).
        storage: rate of the shared file system, "5GB/s" of the whole cluster or "2GB/s/instance"; None for 2 GB/s of
            each instance. Saves and restarts take as long as it needs.
        pue: power usage effectiveness of the data centre, for the energy; None for Amazon's mean.
        network: rate of an instance to others, as in "400 GB/s" or "8x400 Gb/s"; None for the catalog's.
        search: choose the micro-batch and recomputation of a recipe too; they are planned as it has them otherwise.
        ladder: folder of a ladder (hlat ladder), whose law forecasts the loss: ``request.loss``, with its range.

    Returns:
        The plan: ``chosen`` and ``alternatives`` (each with ``candidate``, ``step_seconds``, ``peak_memory`` in bytes,
        medians ``days`` and ``cost_usd``, ``mfu``, ``goodput``), ``request``, and ``to_dict()`` with everything as JSON
        values.

    Raises:
        PlanError: nothing fits, or an argument is wrong; the message suggests what would work.
        HardwareError: the cluster is unknown, or the catalog is inconsistent.
        RecipeError: the recipe or config.json has mistakes.
    """
    given = locals()
    return compare_plans(clusters=[given.pop("cluster")], **given).plans[0]


@checks_arguments
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
    quotes: str | Path | None = None,
    storage: str | None = None,
    pue: float | None = None,
    network: str | None = None,
    search: bool = False,
    ladder: str | Path | None = None,
) -> "ClusterComparison":
    """Plan a run on each of several clusters.

    Args:
        clusters: INSTANCE:N each.
        price: as for ``plan``; None for the first kind that all clusters have.
        rank_by: "time" or "cost" orders the plans; None keeps the order of ``clusters``.
        against: another layout whose prediction is to be compared.
        model, tokens, sequence, global_batch, precision, layout: as for ``plan``.
        hardware, per, interruptions, prices_of, quotes, storage, pue, network, search, ladder: as for ``plan``.

    Returns:
        ``plans``, ``refused`` (the reason, by cluster without a plan), ``against`` (a prediction by cluster), and
        ``to_dict()`` with everything as JSON values.

    Raises:
        PlanError: no cluster can be planned for, or an argument is wrong.
        HardwareError: a cluster is unknown, or the catalog is inconsistent.
        RecipeError: the recipe or config.json has mistakes.
    """
    return compare_clusters(PlanQuestion(**locals()))


@checks_arguments
def plan_grid(
    models: str,
    *,
    clusters: Sequence[str] = (),
    chips: str | None = None,
    tokens: int | None = None,
    sequence: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    price: str | None = None,
    hardware: str | Path | None = None,
    per: str | None = None,
    interruptions: float | None = None,
    prices_of: str | None = None,
    storage: str | None = None,
    pue: float | None = None,
    ladder: str | Path | None = None,
) -> "PlanGrid":
    """Plan a run of each of several models on each of several clusters, and find out what decides the layouts.

    Args:
        models: presets, recipes, config.json files and sizes such as "7b", separated by commas.
        clusters: INSTANCE:N of one kind of chip, as in "p5.48xlarge:8" or "p5.48xlarge:1,8,64".
        chips: an instance instead of ``clusters``: its number is doubled, from the smallest on which a model fits.
        tokens, sequence, global_batch: None for those of HLAT's runs: 1.8T tokens, 1,024 sequences of 4,096.
        precision, price, hardware, per, interruptions, prices_of, storage, pue, ladder: as for ``plan``.

    Returns:
        ``cells``, by model and cluster, each with ``model``, ``request``, ``best`` (a prediction; None if there is no
        layout), ``obstacle`` (why there is none) and ``instead`` (by setting, the best layout with it: ``layout``,
        ``slower``, ``obstacle``); and ``to_dict()`` with everything as JSON values.

    Raises:
        PlanError: an unknown model, several kinds of chips, or too many cells.
        HardwareError: a cluster is unknown, or the catalog is inconsistent.
        RecipeError: a recipe or config.json has mistakes.
    """
    given = locals()
    return plan_grid_for(given.pop("models"), PlanQuestion(**given))


@checks_arguments
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
    quotes: str | Path | None = None,
    storage: str | None = None,
    pue: float | None = None,
    network: str | None = None,
    search: bool = False,
    ladder: str | Path | None = None,
) -> "Purchase":
    """Choose kind and number of instances for a run, by a deadline, a budget, or both.

    With a deadline it is the cheapest cluster that meets it, with a budget alone the fastest within it, without either
    the largest one whose run costs at most 10 % more than the cheapest of its kind. With a budget for a model whose
    number of tokens is not given, neither here nor by a recipe, it is the cluster that trains on most tokens.

    Args:
        chips: instances or chips of the catalog, separated by commas, or "any" for all instances with a price.
        deadline: longest duration of the run, failures and saves included, as in "36h", "14d" or "2w".
        budget: highest cost of the run in USD, as in "50000" or "50k".
        tokens: tokens of the whole run; None for the recipe's, else with a budget as many as it affords, else 20 per
            parameter.
        price: as for ``plan``; None for the kind that most of the instances have.
        quotes: as for ``plan``; "any" then stands for the instances that it names.
        model, sequence, global_batch, precision, hardware: as for ``plan``.
        interruptions, prices_of, storage, pue, network, search, ladder: as for ``plan``.

    Returns:
        ``rows``, the best offer of each kind of instance that meets the goal, the ``chosen`` one first; ``sizes``, the
        numbers of instances that were computed for that kind; ``missed``, the reason by kind without an offer. An offer
        has ``cluster``, ``days``, ``usd`` and ``prediction``.

    Raises:
        PlanError: no cluster meets the goal, or an argument is wrong.
        HardwareError: an instance is unknown, or the catalog is inconsistent.
        RecipeError: the recipe or config.json has mistakes.
    """
    return choose_cluster_for(PlanQuestion(**locals()))


@checks_arguments
def choose_model_size(
    *,
    chips: str = "any",
    budget: str | None = None,
    flops: float | None = None,
    inference_tokens: int | None = None,
    deadline: str | None = None,
    sequence: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    price: str | None = None,
    hardware: str | Path | None = None,
    interruptions: float | None = None,
    prices_of: str | None = None,
    quotes: str | Path | None = None,
    storage: str | None = None,
    pue: float | None = None,
    network: str | None = None,
    ladder: str | Path | None = None,
) -> "ModelSize":
    """Choose the size of a LLaMA-class model and its tokens, for a budget or an amount of compute, and plan its run.

    The size is that of least loss by the scaling law of Hoffmann et al. 2022 with the constants of Besiroglu et al.
    2024, or by that of a ladder; with tokens to be generated, that which trains and generates for the fewest FLOPs
    (Sardana et al. 2023). The shape is the nearest of some that follow Llama 3.

    Args:
        budget: cost of the run in USD, as in "50000" or "50k".
        flops: FLOPs of the run instead of a budget: 6 per parameter and token; with a ladder, attention included.
        inference_tokens: tokens to be generated over the model's life, prompts included.
        chips, deadline, price: as for ``choose_cluster``.
        sequence, global_batch, precision, hardware, interruptions, prices_of, quotes: as for ``plan``.
        storage, pue, network: as for ``plan``.
        ladder: folder of a ladder whose law is used instead.

    Returns:
        ``runs``: the run of the best size (with ``inference_tokens`` that for them, then the one of least loss), each
        with ``parameters``, ``tokens``, ``loss`` and ``offer``, which has ``cluster``, ``days``, ``usd`` and
        ``request``.

    Raises:
        PlanError: neither a budget nor FLOPs, or both; nothing fits; no price is known; or the ladder does not
            determine the size within 2 times.
        HardwareError: an instance is unknown, or the catalog is inconsistent.
    """
    return choose_model_size_for(PlanQuestion(**locals()))


@checks_arguments
def train_ladder(
    recipe: str | Path,
    overrides: Overrides = (),
    *,
    budget: str | None = None,
    flops: str | float | None = None,
    sizes: str = "auto",
    tokens: str = "auto",
    to: str | Path | None = None,
    nproc: int | str = 1,
) -> "LadderReport":
    """Train small models of a recipe, and forecast its loss from them; the same call again goes on.

    Args:
        recipe: a recipe file, or the name of a shipped recipe.
        overrides: changes of the recipe.
        budget: time of all runs together on this machine, as in "2h"; steps of some sizes are measured first.
        flops: FLOPs of all runs together, instead of a time.
        sizes: parameters, as in "1M,3M,10M", or widths, as in "w128,w256"; "auto" for what the budget pays for.
        tokens: tokens per parameter, as in "5,10,20,40"; "auto" for what the budget pays for.
        to: folder of the runs; None for runs/NAME-ladder.
        nproc: processes of each run, as for ``train``.

    Returns:
        ``results`` (of each run its ``run``, ``state``, ``loss``, ``seconds`` and ``exit_code``), ``missing`` (names of
        runs that have not finished), ``ladder`` (its ``fit`` is the law), ``forecast`` (of the recipe; None if too few
        runs have finished), and ``to_dict()`` with everything as JSON values.

    Raises:
        RecipeError: the recipe has mistakes, or there is no ladder of it; with every problem.
        PlanError: an argument is wrong, the budget is too small, or the folder has another ladder.
        LaunchError: steps were to be measured, and their run failed.
    """
    from hlat.ladder import LadderQuestion, LadderReport, plan_ladder, run_ladder

    words = tuple(override_words(overrides))
    question = LadderQuestion(
        str(recipe),
        words,
        budget,
        None if flops is None else str(flops),
        sizes,
        tokens,
        None if to is None else str(to),
    )
    options = () if str(nproc) == "1" else ("--nproc", str(nproc))
    say = logging.getLogger("hlat").info
    plan = plan_ladder(question, options=options, say=say)
    return LadderReport(plan, tuple(run_ladder(plan, say, options=options)))
