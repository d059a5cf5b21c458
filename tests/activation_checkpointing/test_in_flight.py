"""Passes in flight equal those counted in the order of passes of torch's schedules."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from hlat.activation_checkpointing.plan import passes_in_flight
from hlat.config.sections.training import ParallelConfig

TORCH: dict[str, Any] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
FREEING = {"FULL_BACKWARD", "BACKWARD_WEIGHT"}  # passes after which activations are freed


def counted(config: ParallelConfig, rank: int, micro_batches: int) -> int:
    """Count the maximum number of passes in flight of a rank, in torch's order."""
    last = config.stages - 1
    group = {"group_size": config.pipeline, "group_rank": rank, "num_stages": config.stages, "submod": None}
    own = [rank, last - rank] if config.schedule == "zbv" else range(rank, config.stages, config.pipeline)
    stages = [SimpleNamespace(stage_index=i, is_first=i == 0, is_last=i == last, **group) for i in own]
    schedule = TORCH[config.schedule](stages, micro_batches, loss_fn=lambda *_: None)
    alive = most = 0
    for action in schedule.pipeline_order[rank]:
        kind = action.computation_type.name if action is not None else ""
        alive += (kind == "FORWARD") - (kind in FREEING)
        most = max(most, alive)
    assert alive == 0
    return most


@pytest.mark.parametrize("schedule", TORCH)
@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_passes_in_flight_equal_those_of_torchs_schedules(schedule: str, pipeline: int) -> None:
    for stages in (2,) if schedule == "zbv" else (2, 3):
        config = ParallelConfig(pipeline=pipeline, schedule=schedule, virtual_stages=stages)
        for micro_batches in (pipeline, 2 * pipeline, 5 * pipeline):
            for rank in range(pipeline):
                ours = passes_in_flight(config, rank, micro_batches)
                # torch defines zbv for at least 2 ranks - 1 micro-batches, and drops passes of missing ones.
                fewer = schedule == "zbv" and micro_batches < 2 * pipeline - 1
                theirs = counted(config, rank, micro_batches)
                assert ours >= theirs if fewer else ours == theirs, (stages, micro_batches, rank)


def test_passes_in_flight_of_schedules_with_one_stage_per_rank() -> None:
    """GPipe runs all forward passes first; 1F1B as many as there are ranks from this one to the last."""
    gpipe, one_f_one_b = (ParallelConfig(pipeline=4, schedule=schedule) for schedule in ("gpipe", "1f1b"))
    assert [passes_in_flight(gpipe, rank, 7) for rank in range(4)] == [7] * 4
    assert [passes_in_flight(one_f_one_b, rank, 7) for rank in range(4)] == [4, 3, 2, 1]
    assert passes_in_flight(one_f_one_b, 0, 2) == 2
    assert passes_in_flight(ParallelConfig(), 0, 7) == 1
