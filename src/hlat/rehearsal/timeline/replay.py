"""Placement of a rank's operations in time: a stream of computation, and one for each group of ranks.

    trace, seconds of each event, plan's pipeline -> when each event runs -> RankTimeline

A stream runs its events in the order of issue. Operations wait for the messages that they need: of the tensor and
context axes at once, for gathered parameters at the start of their module, for messages of other stages at the start
of a pass, and for everything else before the optimizer's step. A message starts as soon as its stream is free and the
operations issued before it have finished. Other ranks behave as in the plan's simulation of the pipeline. So a wait
has one cause, and computing and waiting add up to the step.
"""

from collections import deque
from dataclasses import dataclass, field

from hlat.parallel import LabelledPass
from hlat.rehearsal.planned_step import PARTS, PlannedStep
from hlat.rehearsal.rank import RankReport
from hlat.rehearsal.timeline.durations import event_seconds
from hlat.rehearsal.trace import TraceEvent

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
    """A rank's step in time.

    Attributes:
        rank: the global rank.
        events: its events, by time on each stream.
        passes: passes of micro-batches, with start and end.
        parts: seconds by ``PARTS``; they add up to ``seconds``.
    """

    rank: int
    events: tuple[PlacedEvent, ...]
    passes: tuple[tuple[LabelledPass, float, float], ...]
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return sum(self.parts.values())


def place_in_time(report: RankReport, plan: PlannedStep) -> RankTimeline:
    """Place the operations of a rehearsed rank in time.

    Args:
        report: the rank.
        plan: prediction of the same step.
    """
    replay = _Replay(plan, report.coordinates.pp)
    for event, seconds in zip(report.trace, event_seconds(report, plan), strict=True):
        replay.add(event, float(seconds))
    return replay.finish(report.rank, plan.operations.stragglers)


@dataclass
class _Replay:
    """State of the streams of a rank while its events are placed.

    Attributes:
        plan: prediction of the step.
        pipeline_rank: pipeline rank of the rank.
        now: end of what computes.
        free: end of each stream of messages.
        gathered: arrival of the parameters of modules that have not computed since.
        received: receives that were issued, of passes that have not begun.
    """

    plan: PlannedStep
    pipeline_rank: int
    now: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    gathered: dict[str, float] = field(default_factory=dict)
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
        """Place the next event."""
        if event.phase in _UPDATE:
            self._end_pass()
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
