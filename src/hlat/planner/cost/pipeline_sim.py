"""A pipeline's step, event by event: which pass of which micro-batch runs where and when.

    schedule, ranks, micro-batches, seconds of each stage -> the order of every rank (pipeline_order.py) -> Timeline

A pass starts when its rank is free, and what it needs has come: forward the output of the stage before, backward the
gradient of the stage after, gradients of weights what came backward. Messages take time and no processor, as they are
sent beside passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hlat.config.sections import ZERO_BUBBLE, Schedule
from hlat.parallel.stages import Kind, Order, order_of


@dataclass(frozen=True)
class Pass:
    """One pass of a micro-batch through a stage, in seconds from the beginning of the step."""

    rank: int
    stage: int
    micro_batch: int
    kind: Kind
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """All passes of a step, by rank in the order in which they run."""

    ranks: tuple[tuple[Pass, ...], ...]

    @property
    def seconds(self) -> float:
        """Until the last pass is over."""
        return max(rank[-1].stop for rank in self.ranks)

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(one.stop - one.start for one in self.ranks[rank])


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a pass, by stage.

    Attributes:
        forward: through the stage.
        backward: all of it.
        weight: of that, what makes the gradients of weights, and can wait where a schedule takes backward apart.
        message: from the end of a pass until another rank has what it made.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    message: float = 0.0

    def of(self, kind: Kind, stage: int) -> float:
        """Of one pass."""
        if kind == "forward":
            return self.forward[stage]
        if kind == "weight":
            return self.weight[stage]
        return self.backward[stage] - (self.weight[stage] if kind == "input" else 0.0)


def simulate_pipeline(schedule: Schedule, ranks: int, micro_batches: int, times: StageTimes) -> Timeline:
    """Run a step.

    Args:
        ranks: of the pipeline; a stage is run by the rank in whose order it stands.
        micro_batches: of the step.
    """
    each = len(times.forward) // ranks
    orders = [order_of(schedule, rank, ranks, micro_batches, each) for rank in range(ranks)]
    places = {stage: rank for rank, order in enumerate(orders) for _, stage, _ in order}
    return _run(orders, places, times, "input" if schedule in ZERO_BUBBLE else "backward")


def _run(orders: list[Order], places: dict[int, int], times: StageTimes, backward: Kind) -> Timeline:
    """Let every rank run as far as it can, until all are through."""
    done: dict[tuple[Kind, int, int], float] = {}
    free = [0.0] * len(orders)
    place = [0] * len(orders)
    timeline: list[list[Pass]] = [[] for _ in orders]
    waiting = set(range(len(orders)))
    while waiting:
        moved = False
        for rank in sorted(waiting):
            while place[rank] < len(orders[rank]):
                kind, stage, batch = orders[rank][place[rank]]
                needed = _needs(kind, stage, batch, len(places) - 1, backward)
                if needed is not None and needed not in done:
                    break
                arrived = 0.0
                if needed is not None:
                    arrived = done[needed] + (times.message if places[needed[1]] != rank else 0.0)
                start = max(free[rank], arrived)
                stop = start + times.of(kind, stage)
                timeline[rank].append(Pass(rank, stage, batch, kind, start, stop))
                done[kind, stage, batch] = free[rank] = stop
                place[rank] += 1
                moved = True
            if place[rank] == len(orders[rank]):
                waiting.discard(rank)
        assert moved or not waiting, "an order in which every rank waits for another"
    return Timeline(tuple(map(tuple, timeline)))


def _needs(kind: Kind, stage: int, batch: int, last: int, backward: Kind) -> tuple[Kind, int, int] | None:
    if kind == "forward":
        return None if stage == 0 else ("forward", stage - 1, batch)
    if kind == "weight":
        return ("input", stage, batch)
    return ("forward", stage, batch) if stage == last else (backward, stage + 1, batch)
