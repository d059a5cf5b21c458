"""Receive buffers of passes that have not begun, in schedules that receive ahead.

    order of the passes of all ranks -> each rank runs a pass when what it needs is there -> messages waiting per pass

In torch's schedules with several stages per rank, or with split backward passes, a receive starts when the message is
sent (``torch.distributed.pipelining.schedules._add_send_recv``), which is at times long before its pass: the first rank
of interleaved 1F1B receives the outputs of the last rank while it still runs other micro-batches.
"""

from functools import lru_cache

from hlat.config import Schedule
from hlat.parallel.stages.pipeline_order import pass_order

_AHEAD = ("interleaved-1f1b", "interleaved-zero-bubble", "zbv")


@lru_cache(maxsize=1024)
def posted_receives(schedule: Schedule, ranks: int, count: int, each: int) -> tuple[tuple[int, ...], ...]:
    """Count the messages that wait for their pass.

    Args:
        schedule: pipeline schedule.
        ranks: number of pipeline ranks.
        count: micro-batches.
        each: stages per rank.

    Returns:
        For each rank and each of its passes, in order, the messages received for later passes. What a stage hands to
        another of the same rank counts as a message.
    """
    orders = [pass_order(schedule, rank, ranks, count, each) for rank in range(ranks)]
    if schedule not in _AHEAD:
        return tuple((0,) * len(order) for order in orders)
    ranks_of_stages = {stage: rank for rank, order in enumerate(orders) for _, stage, _ in order}
    last = ranks * each - 1
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
