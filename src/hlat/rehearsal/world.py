"""Rehearsal of a run: some of its ranks, and every recipe problem that they find.

    recipe, world -> the pipeline ranks that a plan reports -> one or more processes on this machine -> Rehearsal
                   -> cluster: plan of the same step -> verdict on memory, operations in time

    recipe --shortened--> a step of 4 micro-batches --rehearsed--> RankReport --extended--> that of the complete step

Without a pipeline, the micro-batches in the middle are all alike. The third one stands for those left out: its
messages, FLOPs and events are added once for each, and the memory of its tokens, which are on the device for the
complete step. The report equals that of the complete step in every number, which a test compares. With a pipeline every
micro-batch is rehearsed: buffers and order depend on their number.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from hlat.config import Problem, Recipe, RecipeError
from hlat.hardware import Cluster
from hlat.model import deterministic_by_default
from hlat.parallel import (
    Layout,
    StepShape,
    device_problems,
    group_problems,
    needs_whole_matrices,
    rank_groups,
    representative_ranks,
)
from hlat.precision import resolve_mode
from hlat.rehearsal.plan import FitVerdict, PlannedStep, judge, plan_step
from hlat.rehearsal.rank import RankReport, rehearse_rank
from hlat.rehearsal.report import rehearsal_json
from hlat.rehearsal.simulated_device import Decision, SimulatedDevice, decide, simulating
from hlat.rehearsal.timeline import RankTimeline, place_in_time, timeline_events
from hlat.rehearsal.trace import TraceEvent, chrome_events
from hlat.runtime.backend.device import has_fast_bf16
from hlat.runtime.backend.table import backend_of, simulated_backend
from hlat.runtime.distributed.join import fake_rank
from hlat.runtime.errors import LaunchError, PlanError
from hlat.runtime.helper_process import Channel, HelperProcess, PeerEnded, start_program

_KEPT = 4  # the first two and the last differ: gathered parameters, gradients to add to, reductions
_REPEATED = 2  # index of the micro-batch that stands for those left out
_TOKEN = 8  # bytes of a token, of its label, and of its position


def shortened(recipe: Recipe, world: int) -> tuple[Recipe, int]:
    """Return a recipe with fewer micro-batches, and the number of those that are left out."""
    count, layout = recipe.micro_batches(world), Layout.of(recipe.parallel, world)
    if layout.pipeline > 1 or count <= _KEPT:
        return recipe, 0
    batch = recipe.batch.model_copy(update={"global_batch": recipe.batch.global_batch // count * _KEPT})
    return recipe.model_copy(update={"batch": batch}), count - _KEPT


def extended(report: RankReport, left_out: int, recipe: Recipe) -> RankReport:
    """Return the report of the complete step from that of the shortened one."""
    if not left_out:
        return report
    middle = [event for event in report.trace if event.of_pass is not None and event.of_pass.micro_batch == _REPEATED]
    added = _token_bytes(recipe, left_out)
    return replace(
        report,
        peak_bytes=report.peak_bytes + sum(added.values()),
        peak={name: size + added.get(name, 0) for name, size in report.peak.items()},
        trace=_repeated(report.trace, middle, left_out),
    )


def _token_bytes(recipe: Recipe, count: int) -> dict[str, int]:
    """Bytes of the tokens of some micro-batches, by category."""
    # Complete sequences are in "other"; this rank's positions of them are activations.
    complete = count * recipe.batch.micro_batch * recipe.data.sequence_length * _TOKEN
    context = recipe.parallel.context
    selected = (2 if context > 1 else 0) + recipe.data.isolate
    return {"other": 2 * complete, "activations": selected * complete // context}


def _repeated(trace: tuple[TraceEvent, ...], middle: Sequence[TraceEvent], left_out: int) -> tuple[TraceEvent, ...]:
    """Repeat the events of the middle micro-batch, and count the last one on."""
    place = max(index for index, event in enumerate(trace) if event is middle[-1]) + 1
    copies = [event for number in range(left_out) for event in _moved(middle, number + 1)]
    return (*trace[:place], *copies, *_moved(trace[place:], left_out))


def _moved(events: Sequence[TraceEvent], by: int) -> list[TraceEvent]:
    """Add ``by`` to the micro-batch of events."""
    return [
        event
        if event.of_pass is None
        else replace(event, of_pass=event.of_pass._replace(micro_batch=event.of_pass.micro_batch + by))
        for event in events
    ]


_LOG = logging.getLogger("hlat")
_SECONDS_PER_LAYER = 0.15  # of CPU, for one micro-batch (docs/notebook/rehearsal.md)
_LONG = 1000  # layers times micro-batches


@dataclass(frozen=True)
class Rehearsal:
    """Rehearsed ranks of a run, and the verdict on memory and time."""

    recipe: Recipe  # with its precision mode resolved
    layout: Layout  # of all ranks
    ranks: tuple[RankReport, ...]  # those rehearsed, in ascending order
    device: SimulatedDevice | None  # simulated; None for the CPU of this machine
    decisions: tuple[Decision, ...]  # of the program on that device
    verdict: FitVerdict | None = None  # of the fullest rank on the device or the cluster; None without either
    plan: PlannedStep | None = None  # of the same step on the cluster; None without one
    not_planned: str = ""  # reason why there is a cluster but no plan

    @cached_property
    def timelines(self) -> tuple[RankTimeline, ...]:
        """The step of every rehearsed rank in time; empty without a plan."""
        return () if self.plan is None else tuple(place_in_time(report, self.plan) for report in self.ranks)

    def chrome_trace(self) -> dict[str, Any]:
        """Messages and operations of every rehearsed rank as a Chrome trace.

        With a plan, times are those of the cost model, in microseconds. Without one, the unit is a place in the order.
        """
        if self.plan is None:
            events = [event for report in self.ranks for event in chrome_events(report.rank, report.trace)]
        else:
            placed = zip(self.ranks, self.timelines, strict=True)
            events = [event for report, timeline in placed for event in timeline_events(report, timeline)]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def to_dict(self) -> dict[str, Any]:
        return rehearsal_json(self)


def default_ranks(recipe: Recipe, world: int, plan: PlannedStep | None = None) -> list[int]:
    """Global ranks rehearsed by default: the first rank of each pipeline rank that a plan reports."""
    step = StepShape.of(recipe, world)
    # Without a plan by the same rule, by bytes without those that a device adds.
    pipeline_ranks = representative_ranks(step) if plan is None else list(plan.prediction.memory)
    return sorted(step.first_rank(pipeline_rank) for pipeline_rank in pipeline_ranks)


def rehearse(
    recipe: Recipe,
    world: int,
    ranks: Sequence[int] | None = None,
    processes: int = 1,
    on_report: Callable[[RankReport], None] = lambda report: None,
    device: SimulatedDevice | None = None,
    cluster: Cluster | None = None,
) -> Rehearsal:
    """Run one step of some ranks on this machine, with fake tensors and fake collectives.

    Args:
        recipe: recipe, validated for ``world`` processes.
        world: world size of the run.
        ranks: ranks to rehearse; None for ``default_ranks``.
        processes: processes of this machine to use; 1 for the current one.
        on_report: called with each report, in the order of ranks.
        device: device whose decisions are taken; None for the CPU of this machine.
        cluster: cluster whose memory the ranks are compared with, and which their step is predicted for.

    Raises:
        LaunchError: no such rank, or everything that the device cannot do.
        RecipeError: every problem of the recipe on any of these ranks.
    """
    recipe = _resolved(recipe, device)
    layout = Layout.of(recipe.parallel, world)
    plan, not_planned = _plan(recipe, cluster, world)
    chosen = default_ranks(recipe, world, plan) if ranks is None else sorted(set(ranks))
    unknown = [rank for rank in chosen if not 0 <= rank < world]
    if unknown:
        raise LaunchError(f"no rank {unknown[0]} in a world of {world}. The ranks are 0 to {world - 1}.")
    decisions = _decide(recipe, layout, chosen, device)
    short, left_out = shortened(recipe, world)
    _warn_if_long(short, layout)
    # Compiled blocks are counted as eager ones, which keep more; the decisions say so.
    eager = short.model_copy(update={"run": recipe.run.model_copy(update={"compile": "none"})})
    reports: list[RankReport] = []
    problems: dict[str, Problem] = {}
    for outcome in _outcomes(eager, world, chosen, processes, device):
        if isinstance(outcome, RankReport):
            reports.append(extended(outcome, left_out, recipe))
            on_report(reports[-1])
        else:
            problems |= {str(problem): problem for problem in outcome}
    if problems:
        raise RecipeError(list(problems.values()))
    verdict = _judge(reports, device, cluster, plan)
    return Rehearsal(recipe, layout, tuple(reports), device, decisions, verdict, plan, not_planned)


def _warn_if_long(recipe: Recipe, layout: Layout) -> None:
    """Say what many micro-batches through a pipeline cost, and how to rehearse fewer."""
    count, stages = recipe.micro_batches(layout.world), layout.parallel.stages
    layers = -(-recipe.model.layers // layout.pipeline)
    if layers * count > _LONG and count > 2 * stages:
        fewer = recipe.batch.global_batch // count * 2 * stages
        _LOG.warning(
            "rehearsing %s micro-batches through %s layers takes about %s minutes of CPU per rank. "
            "batch.global_batch=%s rehearses %s, which fill the pipeline too.",
            f"{count:,}", layers, round(layers * count * _SECONDS_PER_LAYER / 60), fewer, 2 * stages,
        )  # fmt: skip


def _plan(recipe: Recipe, cluster: Cluster | None, world: int) -> tuple[PlannedStep | None, str]:
    """Predict the step; or say why it is not predicted."""
    if cluster is None:
        return None, ""
    try:
        return plan_step(recipe, cluster, world), ""
    except PlanError as error:
        return None, str(error)


def _judge(
    reports: Sequence[RankReport], device: SimulatedDevice | None, cluster: Cluster | None, plan: PlannedStep | None
) -> FitVerdict | None:
    can_send = device is None or device.backend.sends
    if cluster is not None:
        return judge(reports, cluster.chip, cluster.memory_bytes, plan, can_send)
    if device is None or device.memory_bytes is None:
        return None
    return judge(reports, device.chip, device.memory_bytes, None, can_send)


def _resolved(recipe: Recipe, device: SimulatedDevice | None) -> Recipe:
    """Resolve ``precision.mode=auto`` and ``run.deterministic=auto`` as the device would."""
    named, here = recipe.run.device, torch.device("cpu")
    if device is None:
        # Without a device, the mode is an accelerator's, unless the recipe names the CPU, which is here.
        fast = not backend_of(named).is_everywhere or has_fast_bf16(torch.device(named))
        return recipe.in_mode(resolve_mode(recipe.precision.mode, fast))
    with simulated_backend(device.backend):
        recipe = recipe.in_mode(resolve_mode(recipe.precision.mode, has_fast_bf16(here)))
        asked = recipe.run.determinism
        return recipe.with_determinism(deterministic_by_default(recipe, here) if asked is None else asked)


def _decide(
    recipe: Recipe, layout: Layout, ranks: Sequence[int], device: SimulatedDevice | None
) -> tuple[Decision, ...]:
    """Take the decisions of a simulated device, which may refuse the recipe."""
    if device is None:
        return ()
    here = torch.device("cpu")
    with simulated_backend(device.backend):
        problems = device_problems(recipe, layout.world, here, can_send=device.backend.sends)
        for rank in ranks:
            groups = rank_groups(layout, rank, recipe.model, needs_whole_matrices(recipe))
            problems += group_problems(groups, here)
        if problems:
            raise LaunchError("\n".join(dict.fromkeys(problems)))
        return tuple(decide(recipe, layout.world, here))


Outcome = RankReport | tuple[Problem, ...]


def _outcomes(
    recipe: Recipe, world: int, ranks: Sequence[int], processes: int, device: SimulatedDevice | None
) -> Iterator[Outcome]:
    count = min(processes, len(ranks))
    if count == 1:
        yield from (_outcome(recipe, world, rank, device) for rank in ranks)
        return
    # Not by fork, which torch's threads do not survive. Each takes every count-th rank, in order.
    work, name = f"{__name__}:rehearse_ranks", "a process of the rehearsal"
    helpers: list[HelperProcess] = []
    with ExitStack() as stack:
        for first in range(count):
            helpers.append(start_program(work, recipe, world, ranks[first::count], device, name=name))
            stack.callback(helpers[-1].kill)
        for index in range(len(ranks)):
            try:
                outcome: Outcome = helpers[index % count].receive()
            except PeerEnded as end:
                raise LaunchError(
                    f"{end}. If memory ran out, rehearse with fewer processes, or close other programs."
                ) from None
            yield outcome


def rehearse_ranks(
    channel: Channel, recipe: Recipe, world: int, ranks: Sequence[int], device: SimulatedDevice | None
) -> None:
    """Send the outcome of each rank; the work of a helper process."""
    for rank in ranks:
        channel.send(_outcome(recipe, world, rank, device))


def _outcome(recipe: Recipe, world: int, rank: int, device: SimulatedDevice | None) -> Outcome:
    try:
        with simulating(device, recipe.run.determinism is not False), fake_rank(rank, world) as runtime:
            return rehearse_rank(recipe, runtime)
    except RecipeError as error:
        return error.problems
