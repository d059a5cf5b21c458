"""Seconds of every recorded operation and message of a rank.

    trace, PlannedStep -> products by their shapes, attention by its FLOPs, other kernels by their bytes, messages

Products and messages are timed one by one. The kernels of attention share the attention time of the plan by their
FLOPs. Other kernels share what the plan takes for pointwise operations, gaps between kernels and the host by the bytes
that they move: a rehearsal is eager, and would count many times the traffic of fused kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from hlat.planner import OperationTimes
from hlat.precision import MODES
from hlat.rehearsal.planned_step import PlannedStep
from hlat.rehearsal.rank import RankReport
from hlat.rehearsal.trace import ATTENTION, ATTENTION_BACKWARD, FP8_PRODUCT, OTHERS, PRODUCT, TraceEvent

Seconds = NDArray[np.float64]
_TINY = 1 << 12  # bytes: sums of losses and norms, which take latency only


@dataclass(frozen=True)
class _TimedRank:
    """Events of a rank to be timed, and the times of the plan.

    Attributes:
        events: the trace.
        operations: times by the plan.
        layers: layers of the rank times micro-batches.
        losses: micro-batches whose loss it computes.
        byte: nominal bytes per byte of a message (``hlat.planner.cost.operation_time.OperationTimes``).
        sizes: number of ranks by mesh axis.
    """

    events: Sequence[TraceEvent]
    operations: OperationTimes
    layers: int
    losses: int
    byte: float
    sizes: Mapping[str, int]

    def where(self, wanted: Callable[[TraceEvent], bool]) -> NDArray[np.intp]:
        """Indices of some events."""
        return np.array([index for index, event in enumerate(self.events) if wanted(event)], dtype=np.intp)

    def of_kind(self, kind: str, *phases: str) -> NDArray[np.intp]:
        """Indices of the events of a kind, in some phases or in all."""
        return self.where(lambda event: event.kind == kind and (not phases or event.phase in phases))


def event_seconds(report: RankReport, plan: PlannedStep) -> Seconds:
    """Time every event of a rank's trace.

    Args:
        report: the rehearsed rank.
        plan: prediction of the same step.
    """
    layout = plan.prediction.candidate
    count = layout.accumulation(plan.request.global_batch)
    layers = [stop - start for start, stop in report.layers]
    has_head = any(stop == plan.request.model.layers for _, stop in report.layers)
    rank = _TimedRank(
        report.trace,
        plan.operations,
        sum(layers) * count,
        count * has_head,
        2 / MODES[plan.request.mode].compute.itemsize,
        {"tensor": layout.tensor, "context": layout.context, "data": layout.data, "pipeline": layout.pipeline},
    )
    seconds = np.zeros(len(report.trace))
    for timed in (_products, _attention, _other_kernels, _messages):
        timed(rank, seconds)
    again = rank.where(lambda event: event.recomputed and event.flops > 0)
    seconds[again] *= plan.operations.recomputed
    return seconds


def _products(rank: _TimedRank, seconds: Seconds) -> None:
    for kind in (PRODUCT, FP8_PRODUCT):
        chosen = rank.of_kind(kind)
        if len(chosen):
            shapes = np.array([rank.events[index].shape for index in chosen], dtype=np.float64)
            seconds[chosen] = rank.operations.products(shapes, kind == FP8_PRODUCT)


def _attention(rank: _TimedRank, seconds: Seconds) -> None:
    """Time attention by its FLOPs; those of the first, unrepeated passes take what the plan says."""
    for kind, each in (
        (ATTENTION, rank.operations.attention_forward),
        (ATTENTION_BACKWARD, rank.operations.attention_backward),
    ):
        chosen = rank.of_kind(kind)
        flops = np.array([rank.events[index].flops for index in chosen], dtype=np.float64)
        first = sum(rank.events[index].flops for index in chosen if not rank.events[index].recomputed)
        if first:
            seconds[chosen] = flops / first * each * rank.layers


def _other_kernels(rank: _TimedRank, seconds: Seconds) -> None:
    """Share out the time of other kernels, by bytes, within forward, backward, and the update."""
    times = rank.operations
    budgets = {
        ("forward",): rank.layers * times.others_forward + rank.losses * times.loss,
        ("backward",): rank.layers * times.others_backward,
        ("reduce", "optimizer"): times.update,
    }
    for phases, budget in budgets.items():
        chosen = rank.of_kind(OTHERS, *phases)
        sizes = np.array([rank.events[index].size for index in chosen], dtype=np.float64)
        if len(chosen):
            seconds[chosen] = budget * sizes / sizes.sum()


def _messages(rank: _TimedRank, seconds: Seconds) -> None:
    times = rank.operations
    tensor = rank.where(lambda event: event.axis == "tensor" and event.size > _TINY)
    if len(tensor):
        sizes = np.array([rank.events[index].size * rank.byte for index in tensor], dtype=np.float64)
        halves = np.array([2 if rank.events[index].kind == "all_reduce" else 1 for index in tensor])
        seconds[tensor] = halves * times.tensor_halves(sizes)
    stages = rank.where(lambda event: event.is_between_stages)
    seconds[stages] = times.stage
    keys = rank.where(_exchanges_keys)
    forward = sum(rank.events[index].size for index in keys if rank.events[index].phase == "forward")
    for index in keys:
        seconds[index] = rank.events[index].size / forward * times.context * rank.layers
    timed = {*tensor, *keys, *stages}
    for index in rank.where(lambda event: event.is_message):
        if index not in timed:
            seconds[index] = _weights_message(rank, rank.events[index])


def _exchanges_keys(event: TraceEvent) -> bool:
    """True for messages of context parallelism; those of the same ranks about weights belong to an FSDP module."""
    return event.axis == "context" and not event.module and event.phase in ("forward", "backward")


def _weights_message(rank: _TimedRank, event: TraceEvent) -> float:
    """Time a message about weights or gradients, or of a few bytes."""
    ranks = prod(rank.sizes.get(axis, 1) for axis in event.axis.split("+"))
    rate = {"all_gather": rank.operations.gather, "all_reduce": 2 * rank.operations.reduce}
    transfer = event.size * rank.byte * rate.get(event.kind, rank.operations.reduce)
    return max(transfer, rank.operations.handshake(ranks))
