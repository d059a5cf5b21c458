"""Pipeline schedules: the order of the passes of a rank, and the instants of it at which memory can peak.

    schedule, rank, ranks, micro-batches --pass_order--> [(kind of pass, stage, micro-batch), ...]
        -> for each pass: number of forward passes alive, of backward passes whose
           weight gradients are not computed yet, of messages in memory, of stages with gradients
        -> the instants that no other instant of the same kind of pass exceeds in all of these numbers
    order of the passes of all ranks -> each rank runs a pass when what it needs is there -> messages waiting per pass

The orders are those of ``torch.distributed.pipelining``; a test compares them. They are 1F1B and its interleaved form
(Narayanan et al. 2021, figure 4), GPipe, and two schedules that split the backward pass, so that weight gradients,
which no other stage needs, fill bubbles (Qi et al. 2024, "Zero bubble pipeline parallelism"): interleaved zero bubble,
and zbv, a V of two stages per rank.

Messages in memory are those on their way to other ranks (``Outbox`` in ``parallel/pipeline_parallel.py``), and receive
buffers of passes that have not begun. The received input of a pass that has begun is one of its saved activations.

In torch's schedules with several stages per rank, or with split backward passes, a receive starts when the message is
sent (``torch.distributed.pipelining.schedules._add_send_recv``), which is at times long before its pass: the first rank
of interleaved 1F1B receives the outputs of the last rank while it still runs other micro-batches.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from operator import ge, mul
from typing import Literal, NamedTuple

from hlat.config import Schedule

# ``backward`` computes all gradients; a split pass has ``input``, which the stage before needs, and ``weight``
PassKind = Literal["forward", "backward", "input", "weight"]

PassOrder = list[tuple[PassKind, int, int]]


def pass_order(schedule: Schedule, rank: int, ranks: int, count: int, each: int) -> PassOrder:
    """Return the passes of a pipeline rank in order, for ``count`` micro-batches and ``each`` stages per rank."""
    if schedule == "zbv":
        return _zbv_order(rank, ranks, count)
    total = count * each
    warm_up = total
    if schedule != "gpipe":
        # Forward passes before the first backward pass. With several stages per rank the first micro-batch has to pass
        # all ranks several times; zero bubble starts backward as early as possible.
        step = 2 if schedule == "interleaved-1f1b" else 1
        warm_up = min(total, step * (ranks - rank - 1) + (each - 1) * _round(count, ranks))
    forwards: PassOrder = [("forward", *_nth_pass(index, rank, ranks, count, each, True)) for index in range(total)]
    backwards = [_nth_pass(index, rank, ranks, count, each, False) for index in range(total)]
    order = forwards[:warm_up]
    split = schedule == "interleaved-zero-bubble"
    for index, backward in enumerate(backwards):
        order += forwards[warm_up + index : warm_up + index + 1]
        order.append(("input" if split else "backward", *backward))
        # Weight gradients fill bubbles; rank r delays them by r passes.
        if split and index >= rank:
            order.append(("weight", *backwards[index - rank]))
    return order + ([("weight", *backward) for backward in backwards[max(0, total - rank) :]] if split else [])


def _zbv_order(rank: int, ranks: int, count: int) -> PassOrder:
    """Order of zbv: a rank's first stage is on the way down the V, its second on the way up."""
    down, up = rank, 2 * ranks - 1 - rank
    # The order is defined for enough micro-batches to fill the pipeline; passes of missing ones are dropped.
    filled = max(count, 2 * ranks - 1)
    order: PassOrder = []
    done: Counter[tuple[PassKind, int]] = Counter()

    def run(*passes: tuple[PassKind, int]) -> None:
        for kind, stage in passes:
            order.append((kind, stage, done[kind, stage]))
            done[kind, stage] += 1

    for _ in range(2 * (ranks - rank) - 1):
        run(("forward", down))
    for _ in range(rank):
        run(("forward", up), ("forward", down))
    for _ in range(ranks - rank):
        run(("forward", up), ("input", up), ("weight", up))
    while done["forward", up] < filled:
        if done["forward", down] < filled:
            run(("forward", down))
        run(("input", down), ("weight", down), ("forward", up), ("input", up), ("weight", up))
    for _ in range(rank):
        run(("input", down), ("input", up))
    for _ in range(ranks - rank):
        run(("input", down), ("weight", down))
    for stage in (up, down):
        while done["weight", stage] < filled:
            run(("weight", stage))
    return [each for each in order if each[2] < count]


def _round(count: int, ranks: int) -> int:
    """Number of consecutive micro-batches that a stage runs before the rank switches to its next stage."""
    return count // max(1, count // ranks)


def _nth_pass(index: int, rank: int, ranks: int, count: int, each: int, forward: bool) -> tuple[int, int]:
    """Stage and micro-batch of a rank's n-th pass in one direction."""
    size = _round(count, ranks) if each > 1 else count
    within = index % (size * each)
    stage_index = within // size
    stage = (stage_index if forward else each - 1 - stage_index) * ranks + rank
    return stage, index // (size * each) * size + within % size


# Messages of a rank that may be on their way when its next pass begins, except in 1F1B, which waits for them. In a
# schedule that alternates forward and backward passes these are the messages of the last two of each.
PENDING_SENDS = 4
_ROUNDS = 4  # rounds of as many micro-batches as ranks to replay; later rounds repeat the last


class Instant(NamedTuple):
    """Numbers that decide the memory of a rank at an instant of a step; passes weighted by the size of their stage."""

    forward: bool  # else a backward pass
    stage: int  # index of the pass's stage among those of the rank
    # Forward passes whose weight gradients are not computed yet, over all stages; one of mean size counts 1
    alive: float
    # Those of ``alive`` whose input gradients are computed; none for the first stage, which has no inputs
    waiting: float
    earlier: float  # those of ``waiting`` except for the current pass
    messages: int  # in memory that are no input of a pass in ``alive``
    stages: float  # that have gradients from earlier passes
    waiting_received: int  # those of ``waiting`` that began with a gradient from another stage; not weighted
    last: int  # forward passes alive of the rank's last stage; not weighted
    last_waiting: int  # those of ``last`` whose input gradients are computed


def replayed(schedule: Schedule, ranks: int, count: int) -> int:
    """Number of a step's micro-batches from which its peaks are known."""
    # GPipe keeps the activations of every micro-batch, whatever their number.
    return count if schedule == "gpipe" else min(count, _ROUNDS * ranks)


@lru_cache(maxsize=4096)
def peak_instants(
    schedule: Schedule,
    rank: int,
    ranks: int,
    count: int,  # micro-batches to replay (``replayed``)
    sends: tuple[tuple[bool, bool], ...],  # for each stage of the rank: sends activations, gradients, to another rank
    sizes: tuple[float, ...],
) -> tuple[Instant, ...]:
    """Find the instants of a step at which memory can peak, for stages of these sizes (layers, or in proportion)."""
    # No other instant of a pass of the same kind and stage exceeds these in all numbers.
    front: list[Instant] = []
    for now in sorted(set(_replay(schedule, rank, ranks, count, sends, sizes)), key=_numbers, reverse=True):
        if not any(one[:2] == now[:2] and all(map(ge, _numbers(one), _numbers(now))) for one in front):
            front.append(now)
    return tuple(front)


def _replay(
    schedule: Schedule,
    rank: int,
    ranks: int,
    count: int,
    sends: tuple[tuple[bool, bool], ...],
    sizes: tuple[float, ...],
) -> Iterator[Instant]:
    each, total = len(sizes), sum(sizes)
    passes, waits, has_gradients = [0] * each, [0] * each, [0] * each
    sent = _Sent(schedule == "1f1b", sends)
    posted = posted_receives(schedule, ranks, count, each)[rank]
    order = pass_order(schedule, rank, ranks, count, each)
    last_stage = each * ranks - 1
    has_last = any(stage == last_stage for _, stage, _ in order)

    def weighted(numbers: list[int]) -> float:
        found: float = sum(map(mul, numbers, sizes)) * each / total
        return found

    for (kind, stage, _), received in zip(order, posted, strict=True):
        index = stage // ranks
        passes[index] += kind == "forward"
        waits[index] += kind == "input" and stage > 0
        waiting = weighted(waits)
        yield Instant(
            forward=kind == "forward",
            stage=index,
            alive=weighted(passes),
            waiting=waiting,
            earlier=waiting - (sizes[index] * each / total if waits[index] else 0.0),
            # A backward pass refers to the gradient that it began with until it ends.
            messages=sent.kept(kind == "forward") + received + (kind in ("backward", "input") and stage < last_stage),
            stages=weighted(has_gradients),
            waiting_received=sum(waits[:-1]) + waits[-1] * (not has_last),
            last=passes[-1],
            last_waiting=waits[-1],
        )
        sent.add(kind, index)
        if kind in ("backward", "weight"):
            has_gradients[index] = 1
            passes[index] -= 1
            waits[index] -= kind == "weight" and stage > 0


class _Sent:
    """Messages that a rank has sent and that are still in memory."""

    def __init__(self, together: bool, sends: tuple[tuple[bool, bool], ...]) -> None:
        # 1F1B: torch's loop sends and receives in one operation. It then refers to the last message of each kind until
        # the next, also to the last gradient received.
        self._together, self._sends = together, sends
        self._count = 0
        self._forward = self._backward = False

    def add(self, kind: str, index: int) -> None:
        self._forward |= kind == "forward"
        self._backward |= kind == "backward"
        activations, gradients = self._sends[index]
        self._count += activations if kind == "forward" else gradients and kind != "weight"

    def kept(self, forward: bool) -> int:
        """Number of messages in memory, beside those that a forward or a backward pass began with."""
        if not self._together:
            return min(self._count, PENDING_SENDS)
        ((activations, gradients),) = self._sends
        return activations * self._forward + (gradients + (forward and activations)) * self._backward


def _numbers(instant: Instant) -> tuple[float, ...]:
    """Numbers of an instant of which each needs memory."""
    return instant[2:]


_AHEAD = ("interleaved-1f1b", "interleaved-zero-bubble", "zbv")


@lru_cache(maxsize=1024)
def posted_receives(schedule: Schedule, ranks: int, count: int, each: int) -> tuple[tuple[int, ...], ...]:
    """Count for each rank and each of its passes, in order, the messages received for later passes."""
    orders = [pass_order(schedule, rank, ranks, count, each) for rank in range(ranks)]
    if schedule not in _AHEAD:
        return tuple((0,) * len(order) for order in orders)
    ranks_of_stages = {stage: rank for rank, order in enumerate(orders) for _, stage, _ in order}
    last = ranks * each - 1
    # What a stage hands to another of the same rank counts as a message too
    there: set[tuple[bool, int, int]] = set()  # (forward, stage, micro-batch) of messages
    waiting, found = [0] * ranks, [list[int]() for _ in range(ranks)]
    running = set(range(ranks))
    while running:
        before = sum(map(len, found))
        for rank in sorted(running):
            kind, stage, micro_batch = orders[rank][len(found[rank])]
            forward = kind == "forward"
            if kind != "weight" and stage != (0 if forward else last):
                if (forward, stage, micro_batch) not in there:
                    continue
                waiting[rank] -= 1
            found[rank].append(waiting[rank])
            after = stage + 1 if forward else stage - 1
            if kind != "weight" and 0 <= after <= last:
                there.add((forward, after, micro_batch))
                waiting[ranks_of_stages[after]] += 1
            if len(found[rank]) == len(orders[rank]):
                running.discard(rank)
        assert sum(map(len, found)) > before, "a schedule has no circular dependencies"
    return tuple(map(tuple, found))
