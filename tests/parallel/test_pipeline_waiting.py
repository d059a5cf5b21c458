"""Order of messages: early waits for sends cannot block a pipeline, as even sends that wait for their receive end."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from hlat.parallel.stages.in_flight import posted_receives

TORCH: dict[str, Any] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
Message = tuple[str, int, int]  # (F or B, receiving stage, micro-batch)


def torchs_actions(schedule: str, ranks: int, each: int, count: int) -> list[list[Any]]:
    """Return the passes, sends and receives of each rank in torch's order."""
    last, found = ranks * each - 1, []
    for rank in range(ranks):
        own = [rank, last - rank] if schedule == "zbv" else range(rank, last + 1, ranks)
        group = {"group_size": ranks, "group_rank": rank, "num_stages": last + 1, "submod": None}
        stages = [SimpleNamespace(stage_index=i, is_first=i == 0, is_last=i == last, **group) for i in own]
        built = TORCH[schedule](stages, count, loss_fn=lambda *_: None)
        found.append(built.pipeline_order_with_comms[rank])
    return found


def messages(actions: list[Any]) -> Iterator[tuple[bool, Message]]:
    """Yield the sends (True) and receives (False) of a rank in order."""
    for action in actions:
        name = action.computation_type.value
        if name.startswith("SEND"):
            yield True, (name[-1], action.stage_index + (1 if name[-1] == "F" else -1), action.microbatch_index)
        elif name.startswith("RECV"):
            yield False, (name[-1], action.stage_index, action.microbatch_index)


def gpipe(rank: int, ranks: int, count: int) -> Iterator[tuple[bool, Message]]:
    """Yield the sends and receives of torch's GPipe loop."""
    for kind, step in (("F", 1), ("B", -1)):
        for micro_batch in range(count):
            if 0 <= rank - step < ranks:
                yield False, (kind, rank, micro_batch)
            if 0 <= rank + step < ranks:
                yield True, (kind, rank + step, micro_batch)


def all_end(ranks: list[Iterator[tuple[bool, Message]]]) -> bool:
    """Run ranks of which each waits at each send and each receive until its peer has come to it too."""
    waiting = [next(each, None) for each in ranks]
    while any(waiting):
        met = {at[1] for at in waiting if at and at[0]} & {at[1] for at in waiting if at and not at[0]}
        if not met:
            return False
        for rank, at in enumerate(waiting):
            if at and at[1] in met:
                waiting[rank] = next(ranks[rank], None)
    return True


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", ["gpipe", *TORCH])
def test_a_schedule_ends_if_every_send_and_receive_waits_for_its_peer(schedule: str, ranks: int) -> None:
    for count in (2 * ranks, 3 * ranks):
        if schedule == "gpipe":
            assert all_end([gpipe(rank, ranks, count) for rank in range(ranks)])
            continue
        for each in (2,) if schedule == "zbv" else (2, 3):
            assert all_end([messages(actions) for actions in torchs_actions(schedule, ranks, each, count)])


def test_a_schedule_with_circular_waits_does_not_end() -> None:
    """The check above can fail."""
    one, two = ("F", 1, 0), ("B", 0, 0)
    assert not all_end([iter([(True, one), (False, two)]), iter([(True, two), (False, one)])])


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("schedule", TORCH)
def test_receives_ahead_are_counted_within_two_messages_of_torchs(schedule: Any, ranks: int) -> None:
    """Torch leaves slots of its orders empty, which are not counted and start some receives a pass or two earlier."""
    each, count = 2, 3 * ranks
    last = ranks * each - 1
    for rank, actions in enumerate(torchs_actions(schedule, ranks, each, count)):
        own = {action.stage_index for action in actions}
        waiting, found = 0, []
        for action in actions:
            name, stage = action.computation_type.value, action.stage_index
            before, after = (stage - 1, stage + 1) if name == "F" else (stage + 1, stage - 1)
            if name.startswith("RECV"):
                waiting += 1
            elif name in ("F", "B", "I", "W"):
                waiting -= name != "W" and 0 <= before <= last
                found.append(waiting)
                waiting += name != "W" and after in own  # handed over at the turn of a V
        counted = posted_receives(schedule, ranks, count, each)[rank]
        assert len(counted) == len(found)
        assert all(0 <= theirs - ours <= 2 for ours, theirs in zip(counted, found, strict=True))
        assert max(found) <= max(counted) + 1
