"""A rank's operations in time: a stream of computation, and one for each group of ranks.

    trace, PlannedStep -> products by their shapes, attention by its FLOPs, other kernels by their bytes, messages
        -> seconds of each event, plan's pipeline -> when each event runs -> RankTimeline
        -> a process per rank in the trace event format, for chrome://tracing and Perfetto

Products and messages are timed one by one. Attention shares the attention time of the plan by FLOPs. Other kernels
share the plan's time for pointwise operations, gaps and the host by bytes: a rehearsal is eager, and would count many
times the traffic of fused kernels.

A stream runs its events in the order of issue. Operations wait for the messages that they need: of the tensor and
context axes at once, for gathered parameters at the start of their module, for messages of other stages at the start
of a pass, and for everything else before the optimizer's step. A message starts as soon as its stream is free and the
operations issued before it have finished. Other ranks behave as in the plan's simulation of the pipeline. So a wait
has one cause, and computing and waiting add up to the step.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlat.parallel import LabelledPass
from hlat.planner import OperationTimes
from hlat.precision import MODES
from hlat.rehearsal.plan import PARTS, PlannedStep
from hlat.rehearsal.rank import RankReport
from hlat.rehearsal.trace import ATTENTION, ATTENTION_BACKWARD, FP8_PRODUCT, OTHERS, PRODUCT, TraceEvent, described

Seconds = NDArray[np.float64]
_TINY = 1 << 12  # bytes: sums of losses and norms, which take latency only


@dataclass(frozen=True)
class _TimedRank:
    """Events of a rank to be timed, and the times of the plan."""

    events: Sequence[TraceEvent]
    operations: OperationTimes  # times by the plan
    layers: int  # of the rank, times micro-batches
    losses: int  # micro-batches whose loss it computes
    byte: float  # nominal bytes per byte of a message (OperationTimes)
    sizes: Mapping[str, int]  # ranks by mesh axis

    def where(self, wanted: Callable[[TraceEvent], bool]) -> NDArray[np.intp]:
        return np.array([index for index, event in enumerate(self.events) if wanted(event)], dtype=np.intp)

    def numbers(self, indices: NDArray[np.intp], name: str) -> NDArray[np.float64]:
        """One field of some events."""
        return np.array([getattr(self.events[index], name) for index in indices], dtype=np.float64)

    def of_kind(self, kind: str, *phases: str) -> NDArray[np.intp]:
        """Indices of the events of a kind, in some phases or in all."""
        return self.where(lambda event: event.kind == kind and (not phases or event.phase in phases))


def event_seconds(report: RankReport, plan: PlannedStep) -> Seconds:
    """Time every event of a rank's trace by the plan of the same step."""
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
    return seconds


def _products(rank: _TimedRank, seconds: Seconds) -> None:
    for kind in (PRODUCT, FP8_PRODUCT):
        chosen = rank.of_kind(kind)
        if len(chosen):
            seconds[chosen] = rank.operations.products(rank.numbers(chosen, "shape"), kind == FP8_PRODUCT)


def _attention(rank: _TimedRank, seconds: Seconds) -> None:
    """Time attention by its FLOPs."""
    for kind, each in (
        (ATTENTION, rank.operations.attention_forward),
        (ATTENTION_BACKWARD, rank.operations.attention_backward),
    ):
        chosen = rank.of_kind(kind)
        flops = rank.numbers(chosen, "flops")
        # The plan's time is of the first pass; a repeated one takes as much again.
        first = flops[rank.numbers(chosen, "recomputed") == 0].sum()
        if first:
            seconds[chosen] = flops / first * each * rank.layers


def _other_kernels(rank: _TimedRank, seconds: Seconds) -> None:
    times = rank.operations
    # The plan has no time for a single kernel: they share that of their phase by bytes.
    budgets = {
        ("forward",): rank.layers * times.others_forward + rank.losses * times.loss,
        ("backward",): rank.layers * times.others_backward,
        ("reduce", "optimizer"): times.update,
    }
    for phases, budget in budgets.items():
        chosen = rank.of_kind(OTHERS, *phases)
        sizes = rank.numbers(chosen, "size")
        if len(chosen):
            seconds[chosen] = budget * sizes / sizes.sum()


def _messages(rank: _TimedRank, seconds: Seconds) -> None:
    times = rank.operations
    tensor = rank.where(lambda event: event.axis == "tensor" and event.size > _TINY)
    if len(tensor):
        sizes = rank.numbers(tensor, "size") * rank.byte
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
    # Small messages take latency only.
    return max(transfer, rank.operations.handshake(ranks))


COMPUTE, SENDS, RECEIVES = "compute", "send", "receive"
_STAGES = (SENDS, RECEIVES)  # streams of messages between stages
_UPDATE = ("reduce", "optimizer")  # phases after all passes


@dataclass(frozen=True)
class PlacedEvent:
    """An event on a stream; seconds from the start of the step."""

    stream: str
    start: float
    stop: float
    event: TraceEvent


@dataclass(frozen=True)
class RankTimeline:
    """A rank's step in time."""

    rank: int  # global
    events: tuple[PlacedEvent, ...]  # by time on each stream
    passes: tuple[tuple[LabelledPass, float, float], ...]  # of micro-batches, with start and end
    parts: dict[str, float]  # seconds by PARTS; they add up to `seconds`

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def place_in_time(report: RankReport, plan: PlannedStep) -> RankTimeline:
    """Place the operations of a rehearsed rank in time, by the plan of the same step."""
    replay = _Replay(plan, report.coordinates.pp)
    for event, seconds in zip(report.trace, event_seconds(report, plan), strict=True):
        replay.add(event, float(seconds))
    return replay.finish(report.rank, plan.operations.stragglers)


@dataclass
class _Replay:
    """State of the streams of a rank while its events are placed."""

    plan: PlannedStep
    pipeline_rank: int
    now: float = 0.0  # end of what computes
    free: dict[str, float] = field(default_factory=dict)  # end of each stream of messages
    # Arrival of the parameters of modules that have not computed since.
    gathered: dict[str, float] = field(default_factory=dict)
    # Receives that were issued, of passes that have not begun.
    received: deque[tuple[TraceEvent, float]] = field(default_factory=deque)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    placed: list[PlacedEvent] = field(default_factory=list)
    passes: list[tuple[LabelledPass, float, float]] = field(default_factory=list)
    current: LabelledPass | None = None
    begun: float = 0.0

    def __post_init__(self) -> None:
        ranks = () if self.plan.pipeline is None else self.plan.pipeline.ranks[self.pipeline_rank]
        self.arrivals = {(each.kind, each.stage, each.micro_batch): each.arrived for each in ranks}

    def add(self, event: TraceEvent, seconds: float) -> None:
        if event.phase in _UPDATE:
            self._end_pass()
            # The update needs every message of the step but those between stages.
            self._wait(max((end for stream, end in self.free.items() if stream not in _STAGES), default=0.0), "data")
        elif event.of_pass is not None and event.of_pass != self.current and not event.is_between_stages:
            self._begin_pass(event.of_pass)
        if not event.is_message:
            self._compute(event, seconds)
        elif event.is_between_stages:
            self._between_stages(event, seconds)
        else:
            self._exchange(event, seconds)

    def finish(self, rank: int, stragglers: float) -> RankTimeline:
        """Return the step, which ends when the slowest device does."""
        self._end_pass()
        self.parts["stragglers"] += stragglers
        return RankTimeline(rank, tuple(self.placed), tuple(self.passes), self.parts)

    def _wait(self, until: float, part: str) -> None:
        self.parts[part] += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def _begin_pass(self, begins: LabelledPass) -> None:
        self._end_pass()
        arrival = self.arrivals.get(begins, 0.0)
        if arrival and self.received:
            event, seconds = self.received.popleft()
            arrival = self._place(RECEIVES, max(self.free.get(RECEIVES, 0.0), arrival - seconds), seconds, event)
        self._wait(arrival, "pipeline")
        self.current, self.begun = begins, self.now

    def _end_pass(self) -> None:
        if self.current is not None:
            self.passes.append((self.current, self.begun, self.now))
            self.current = None

    def _compute(self, event: TraceEvent, seconds: float) -> None:
        self._wait(self.gathered.pop(event.module, 0.0), "data")
        self.parts["optimizer" if event.phase in _UPDATE else "compute"] += seconds
        self.now = self._place(COMPUTE, self.now, seconds, event)

    def _between_stages(self, event: TraceEvent, seconds: float) -> None:
        # Issued early; placed when the pass that needs it begins.
        if event.kind == RECEIVES:
            self.received.append((event, seconds))
        else:
            self._place(SENDS, max(self.now, self.free.get(SENDS, 0.0)), seconds, event)

    def _exchange(self, event: TraceEvent, seconds: float) -> None:
        if "pipeline" in event.axis and self.plan.pipeline is not None:
            self._wait(self.plan.pipeline.seconds, "pipeline")
        stop = self._place(event.axis, max(self.now, self.free.get(event.axis, 0.0)), seconds, event)
        if event.module and event.kind == "all_gather":
            self.gathered[event.module] = stop
        elif not event.module:
            self._wait(stop, next((part for part in ("tensor", "context") if event.axis == part), "data"))

    def _place(self, stream: str, start: float, seconds: float, event: TraceEvent) -> float:
        stop = start + seconds
        self.placed.append(PlacedEvent(stream, start, stop, event))
        if stream != COMPUTE:
            self.free[stream] = stop
        return stop


_PASSES = "passes"
_MICROSECONDS = 1e6


def timeline_events(report: RankReport, timeline: RankTimeline) -> Iterator[dict[str, Any]]:
    """Yield the metadata of a rank and its tracks, and complete events in microseconds."""
    layers = ", ".join(f"{start} to {stop - 1}" for start, stop in report.layers)
    yield _metadata(timeline.rank, 0, "process_name", f"rank {timeline.rank}, layers {layers}")
    yield {**_metadata(timeline.rank, 0, "process_sort_index", ""), "args": {"sort_index": timeline.rank}}
    messages = sorted({placed.stream for placed in timeline.events} - {COMPUTE})
    tracks = {name: number for number, name in enumerate((_PASSES, COMPUTE, *messages))}
    for name, number in tracks.items():
        shown = name if name in (_PASSES, COMPUTE) else f"messages: {name}"
        yield _metadata(timeline.rank, number, "thread_name", shown)
        yield {**_metadata(timeline.rank, number, "thread_sort_index", ""), "args": {"sort_index": number}}
    for of_pass, start, stop in timeline.passes:
        arguments = {"stage": of_pass.stage, "micro-batch": of_pass.micro_batch}
        said = {"name": f"{of_pass.kind} {of_pass.micro_batch}", "cat": of_pass.kind, "args": arguments}
        yield _complete(timeline.rank, tracks[_PASSES], start, stop, said)
    for placed in timeline.events:
        yield _complete(timeline.rank, tracks[placed.stream], placed.start, placed.stop, described(placed.event))


def _metadata(rank: int, track: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": track, "name": kind, "args": {"name": name}}


def _complete(rank: int, track: int, start: float, stop: float, said: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": track,
        "ts": start * _MICROSECONDS,
        "dur": (stop - start) * _MICROSECONDS,
        **said,
    }
