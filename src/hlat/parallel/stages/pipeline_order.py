"""Order of the forward and backward passes of a pipeline rank, for every schedule of the recipe.

    schedule, rank, micro-batches -> [(kind of pass, stage, micro-batch), ...]

The orders are those of ``torch.distributed.pipelining``; a test compares them. They are 1F1B and its interleaved form
(Narayanan et al. 2021, figure 4), GPipe, and two schedules that split the backward pass, so that weight gradients,
which no other stage needs, fill bubbles (Qi et al. 2024, "Zero bubble pipeline parallelism"): interleaved zero bubble,
and zbv, a V of two stages per rank.
"""

from collections import Counter
from typing import Literal

from hlat.config import Schedule

PassKind = Literal["forward", "backward", "input", "weight"]
"""``backward`` computes all gradients; a split pass has ``input``, which the stage before needs, and ``weight``."""

PassOrder = list[tuple[PassKind, int, int]]


def pass_order(schedule: Schedule, rank: int, ranks: int, count: int, each: int) -> PassOrder:
    """Return the passes of a pipeline rank in order.

    Args:
        schedule: pipeline schedule.
        rank: pipeline rank.
        ranks: number of pipeline ranks.
        count: micro-batches of the step.
        each: stages per rank.
    """
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
    """Order the passes of zbv: a rank's first stage is on the way down the V, its second on the way up."""
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
    """Return stage and micro-batch of a rank's n-th pass in one direction."""
    size = _round(count, ranks) if each > 1 else count
    within = index % (size * each)
    stage_index = within // size
    stage = (stage_index if forward else each - 1 - stage_index) * ranks + rank
    return stage, index // (size * each) * size + within % size
