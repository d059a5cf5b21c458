"""Event simulation of a pipeline step: when each pass of each micro-batch runs, and on which rank.

    schedule, ranks, micro-batches, seconds of each stage -> the order of every rank (pipeline_order.py) -> Timeline

A pass starts when its rank is free and its input has arrived: for forward the output of the previous stage, for
backward the gradient from the next stage, for gradients of weights the input-gradient pass of the same stage. Messages
take time but do not occupy a rank, since they overlap with passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hlat.config import ZERO_BUBBLE, Schedule
from hlat.parallel import PassKind, PassOrder, pass_order


@dataclass(frozen=True)
class Pass:
    """One pass of a micro-batch through a stage; times in seconds from the start of the step.

    ``arrived`` is the arrival of its input from another stage; 0 without one.
    """

    rank: int
    stage: int
    micro_batch: int
    kind: PassKind
    start: float
    stop: float
    arrived: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """All passes of a step: per rank, in order of execution."""

    ranks: tuple[tuple[Pass, ...], ...]

    @property
    def seconds(self) -> float:
        """End of the last pass."""
        return max(rank[-1].stop for rank in self.ranks)

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(each.stop - each.start for each in self.ranks[rank])


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a pass, by stage.

    Attributes:
        forward: forward pass.
        backward: complete backward pass.
        weight: the share of backward that computes gradients of weights, which zero-bubble schedules delay.
        message: from the end of a pass until another rank has received its output.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    message: float = 0.0

    def duration(self, kind: PassKind, stage: int) -> float:
        """Seconds of one pass of this kind."""
        if kind == "forward":
            return self.forward[stage]
        if kind == "weight":
            return self.weight[stage]
        return self.backward[stage] - (self.weight[stage] if kind == "input" else 0.0)


def simulate_pipeline(schedule: Schedule, ranks: int, micro_batches: int, times: StageTimes) -> Timeline:
    """Simulate one step.

    Args:
        schedule: pipeline schedule.
        ranks: pipeline ranks.
        micro_batches: micro-batches of the step.
        times: seconds of each pass; its length is the number of stages, a multiple of ``ranks``.
    """
    stages_per_rank = len(times.forward) // ranks
    orders = [pass_order(schedule, rank, ranks, micro_batches, stages_per_rank) for rank in range(ranks)]
    rank_of_stage = {stage: rank for rank, order in enumerate(orders) for _, stage, _ in order}
    return _run(orders, rank_of_stage, times, "input" if schedule in ZERO_BUBBLE else "backward")


def _run(orders: list[PassOrder], rank_of_stage: dict[int, int], times: StageTimes, backward: PassKind) -> Timeline:
    """Advance every rank as far as its inputs allow, until all ranks have finished."""
    finished: dict[tuple[PassKind, int, int], float] = {}
    free_at = [0.0] * len(orders)
    position = [0] * len(orders)
    timeline: list[list[Pass]] = [[] for _ in orders]
    waiting = set(range(len(orders)))
    while waiting:
        advanced = False
        for rank in sorted(waiting):
            while position[rank] < len(orders[rank]):
                kind, stage, batch = orders[rank][position[rank]]
                needed = _input_of(kind, stage, batch, len(rank_of_stage) - 1, backward)
                if needed is not None and needed not in finished:
                    break
                arrived = 0.0
                if needed is not None:
                    arrived = finished[needed] + (times.message if rank_of_stage[needed[1]] != rank else 0.0)
                start = max(free_at[rank], arrived)
                stop = start + times.duration(kind, stage)
                timeline[rank].append(Pass(rank, stage, batch, kind, start, stop, arrived))
                finished[kind, stage, batch] = free_at[rank] = stop
                position[rank] += 1
                advanced = True
            if position[rank] == len(orders[rank]):
                waiting.discard(rank)
        assert advanced or not waiting, "deadlock: every rank waits for another"
    return Timeline(tuple(map(tuple, timeline)))


def _input_of(
    kind: PassKind, stage: int, batch: int, last: int, backward: PassKind
) -> tuple[PassKind, int, int] | None:
    """The pass whose output this pass needs; None for the first stage's forward pass."""
    if kind == "forward":
        return None if stage == 0 else ("forward", stage - 1, batch)
    if kind == "weight":
        return ("input", stage, batch)
    return ("forward", stage, batch) if stage == last else (backward, stage + 1, batch)
