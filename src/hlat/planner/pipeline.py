"""A pipeline's step, event by event: which pass of which micro-batch runs where and when.

    schedule, ranks, micro-batches, seconds of each stage -> the order of every rank -> Timeline

A pass starts when its rank is free, and what it needs has come: forward the output of the stage before, backward the
gradient of the stage after. Messages take time and no processor, as they are sent beside passes. Orders are those of
``torch.distributed.pipelining``: 1F1B (Narayanan et al. 2021, figure 4), its interleaved form, and GPipe.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hlat.config import Schedule
from hlat.runtime import PlanError


@dataclass(frozen=True)
class Pass:
    """One pass of a micro-batch through a stage, in seconds from the beginning of the step."""

    rank: int
    stage: int
    micro_batch: int
    forward: bool
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


Order = list[tuple[bool, int, int]]  # forward?, stage, micro-batch


def simulate(
    schedule: Schedule,
    ranks: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    message: float = 0.0,
) -> Timeline:
    """Run a step.

    Args:
        schedule: 1f1b, interleaved-1f1b or gpipe.
        ranks: of the pipeline; stage s is run by rank s mod ranks.
        micro_batches: of the step.
        forward, backward: seconds of a pass, by stage.
        message: seconds from the end of a pass until another rank has what it made.

    Raises:
        PlanError: a schedule whose order is not known here.
    """
    if schedule not in ("1f1b", "interleaved-1f1b", "gpipe"):
        raise PlanError(f"the schedule {schedule} is not simulated; 1f1b, interleaved-1f1b and gpipe are")
    orders = [_order(schedule, rank, ranks, micro_batches, len(forward) // ranks) for rank in range(ranks)]
    return _run(orders, ranks, forward, backward, message)


def _run(
    orders: list[Order], ranks: int, forward: Sequence[float], backward: Sequence[float], message: float
) -> Timeline:
    last = len(forward) - 1
    done: dict[tuple[bool, int, int], float] = {}
    free = [0.0] * ranks
    place = [0] * ranks
    timeline: list[list[Pass]] = [[] for _ in range(ranks)]
    waiting = set(range(ranks))
    while waiting:
        moved = False
        for rank in sorted(waiting):
            while place[rank] < len(orders[rank]):
                ahead, stage, batch = orders[rank][place[rank]]
                needed = _needs(ahead, stage, batch, last)
                if needed is not None and needed not in done:
                    break
                arrived = 0.0 if needed is None else done[needed] + (message if needed[1] != stage else 0.0)
                start = max(free[rank], arrived)
                stop = start + (forward if ahead else backward)[stage]
                timeline[rank].append(Pass(rank, stage, batch, ahead, start, stop))
                done[ahead, stage, batch] = free[rank] = stop
                place[rank] += 1
                moved = True
            if place[rank] == len(orders[rank]):
                waiting.discard(rank)
        assert moved or not waiting, "an order in which every rank waits for another"
    return Timeline(tuple(map(tuple, timeline)))


def _needs(forward: bool, stage: int, batch: int, last: int) -> tuple[bool, int, int] | None:
    if forward:
        return None if stage == 0 else (True, stage - 1, batch)
    return (True, stage, batch) if stage == last else (False, stage + 1, batch)


def _order(schedule: Schedule, rank: int, ranks: int, count: int, each: int) -> Order:
    """The passes of a rank, in order."""
    total = count * each
    if schedule == "gpipe":
        first, ahead = total, 0
    elif schedule == "1f1b":
        ahead = 1
        first = min(total, ranks - rank - 1)
    else:
        ahead = 1
        first = min(total, 2 * (ranks - rank - 1) + (each - 1) * _round(count, ranks))
    forwards = [_place(index, rank, ranks, count, each, True) for index in range(total)]
    backwards = [_place(index, rank, ranks, count, each, False) for index in range(total)]
    order: Order = [(True, *one) for one in forwards[:first]]
    for index in range(total - first):
        order.append((True, *forwards[first + index]))
        order.append((False, *backwards[index]))
    order += [(False, *one) for one in backwards[total - first if ahead else 0 :]]
    return order


def _round(count: int, ranks: int) -> int:
    """Micro-batches that go through a stage before the rank's next stage takes them."""
    return count // max(1, count // ranks)


def _place(index: int, rank: int, ranks: int, count: int, each: int, forward: bool) -> tuple[int, int]:
    """The stage and micro-batch of a rank's n-th pass in one direction."""
    size = _round(count, ranks) if each > 1 else count
    within = index % (size * each)
    turn = within // size
    stage = (turn if forward else each - 1 - turn) * ranks + rank
    return stage, index // (size * each) * size + within % size
