"""Sentences about a plan: what it is, what it assumes, what to expect.

TrainingPlan -> (sentence, indentation of its further lines), the most important first
"""

from collections.abc import Iterator

from hlat.planner.report.energy import energy_sentence
from hlat.planner.report.explain import comparison_with, expectation, explain
from hlat.planner.report.saves import storage_sentence
from hlat.planner.search.determinism import DeterminismCost
from hlat.planner.search.plan import TrainingPlan, fits, format_number
from hlat.planner.search.search import LayoutPrediction
from hlat.runtime.terminal_text import plural

_GIB = 1 << 30


def plan_words(plan: TrainingPlan, explained: bool, other: LayoutPrediction | None) -> Iterator[tuple[str, int]]:
    """Yield the sentences about a plan, each with the indentation of its further lines.

    Args:
        plan: the plan.
        explained: True for the reasons of its layout.
        other: a layout to compare with; None for none.
    """
    request, said = plan.request, plan.assumptions()
    cluster, steps = request.cluster, plural(request.steps, "step")
    machines = f"{cluster.count:,} instances of {plural(cluster.instance.chips, 'chip')}, " if cluster.count > 1 else ""
    devices = f"{cluster.devices:,} device{'s' if cluster.devices > 1 else ''}"
    yield f"{request.name} on {cluster.name}: {machines}{devices}, {steps}, precision {request.mode}", 2
    for one in request.assumed:
        yield f"  assumed    {one}", 13
    yield f"  expect     {expectation(plan.chosen)}", 13
    if plan.determinism is not None:
        yield f"  attention  {_determinism_sentence(plan.determinism)}", 13
    price = (
        "not known"
        if said["usd_per_hour"] is None
        else f"{said['usd_per_hour']:,.2f} USD per hour, {said['price_kind']}"
    )
    yield f"  price      {price}", 13
    yield f"  energy     {energy_sentence(request, plan.chosen)}", 13
    yield (
        f"  failures   one in {said['mean_hours_between_failures']:.1f} hours; save every "
        f"{said['checkpoint_every_steps']:,} steps; goodput {plan.chosen.goodput:.1%} by Daly's formula, "
        f"{plan.goodput_simulated[0]:.1%} simulated, {plan.goodput_simulated[1]:.1%} in the worst tenth of runs",
        13,
    )
    yield f"  saves      {storage_sentence(request, plan.chosen)}", 13
    if not fits(request, plan.chosen):
        need = plan.chosen.peak_memory / _GIB
        yield f"  memory     DOES NOT FIT: {need:.1f} GiB of {said['memory_gib_per_device']} GiB", 13
    for line in explain(plan) if explained else []:
        yield f"  {line}", 4
    if other is not None:
        yield f"  {comparison_with(plan, other)}", 4


def _determinism_sentence(cost: DeterminismCost) -> str:
    """Name the planned kernel of attention and the other one, with the step time of each."""
    planned, other = (
        f"{cost.kernels[value]}, {format_number(cost.seconds[value])} s per step with "
        f"run.deterministic={str(value).lower()}"
        for value in (cost.chosen, not cost.chosen)
    )
    return f"{planned}; {other}"
