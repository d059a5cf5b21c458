"""The order in which a pipeline rank runs its passes, in every schedule that recipes name.

    schedule, rank, micro-batches -> [(kind of pass, stage, micro-batch), ...]

The orders are those of ``torch.distributed.pipelining``, which a test asks: 1F1B and its interleaved form (Narayanan et
al. 2021, figure 4), GPipe, and two in which backward is taken apart, so that the gradients of weights, for which nobody
waits, fill gaps (Qi et al. 2024, "Zero bubble pipeline parallelism"): interleaved, and in a V of two stages per rank.
"""

from collections import Counter
from typing import Literal

from hlat.config.sections import Schedule

PassKind = Literal["forward", "backward", "input", "weight"]
"""``backward`` whole; where it is taken apart, ``input``, for which the stage before waits, and ``weight``."""

PassOrder = list[tuple[PassKind, int, int]]


def pass_order(schedule: Schedule, rank: int, ranks: int, count: int, each: int) -> PassOrder:
    """The passes of a rank.

    Args:
        rank, ranks: of the pipeline.
        count: micro-batches of the step.
        each: stages per rank.
    """
    if schedule == "zbv":
        return _in_a_v(rank, ranks, count)
    total = count * each
    first = total
    if schedule != "gpipe":
        # With several stages per rank, what comes before the first backward pass goes down the pipeline and back;
        # zero bubble starts backward as soon as it can.
        step = 2 if schedule == "interleaved-1f1b" else 1
        first = min(total, step * (ranks - rank - 1) + (each - 1) * _round(count, ranks))
    forwards: PassOrder = [("forward", *_place(index, rank, ranks, count, each, True)) for index in range(total)]
    places = [_place(index, rank, ranks, count, each, False) for index in range(total)]
    order = forwards[:first]
    split = schedule == "interleaved-zero-bubble"
    for index, place in enumerate(places):
        order += forwards[first + index : first + index + 1]
        order.append(("input" if split else "backward", *place))
        # The first ranks are the first to fill gaps; the others are behind by as many passes as their place.
        if split and index >= rank:
            order.append(("weight", *places[index - rank]))
    return order + ([("weight", *place) for place in places[max(0, total - rank) :]] if split else [])


def _in_a_v(rank: int, ranks: int, count: int) -> PassOrder:
    """A rank's first stage lies on the way down, its second on the way back up."""
    down, up = rank, 2 * ranks - 1 - rank
    # It is laid out for so many that the pipeline fills; what there is not is left out.
    whole = max(count, 2 * ranks - 1)
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
    while done["forward", up] < whole:
        if done["forward", down] < whole:
            run(("forward", down))
        run(("input", down), ("weight", down), ("forward", up), ("input", up), ("weight", up))
    for _ in range(rank):
        run(("input", down), ("input", up))
    for _ in range(ranks - rank):
        run(("input", down), ("weight", down))
    for stage in (up, down):
        while done["weight", stage] < whole:
            run(("weight", stage))
    return [one for one in order if one[2] < count]


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
