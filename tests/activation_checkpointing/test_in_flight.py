"""Micro-batches in flight, counted in the order of passes that torch's schedules lay out."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from hlat.activation_checkpointing.in_flight import passes_in_flight
from hlat.config.sections import ParallelConfig

TORCH: dict[str, Any] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
ENDS = {"FULL_BACKWARD", "BACKWARD_WEIGHT"}  # what ends a forward pass: all of backward, or its last part


def counted(config: ParallelConfig, rank: int, micro_batches: int) -> int:
    """The most forward passes of a rank that are not ended, in torch's order."""
    last = config.stages - 1
    group = {"group_size": config.pipeline, "group_rank": rank, "num_stages": config.stages, "submod": None}
    mine = [rank, last - rank] if config.schedule == "zbv" else range(rank, config.stages, config.pipeline)
    stages = [SimpleNamespace(stage_index=i, is_first=i == 0, is_last=i == last, **group) for i in mine]
    schedule = TORCH[config.schedule](stages, micro_batches, loss_fn=lambda *_: None)
    alive = most = 0
    for action in schedule.pipeline_order[rank]:
        kind = action.computation_type.name if action is not None else ""
        alive += (kind == "FORWARD") - (kind in ENDS)
        most = max(most, alive)
    assert alive == 0
    return most


@pytest.mark.parametrize("schedule", TORCH)
@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_the_most_passes_in_flight(schedule: str, pipeline: int) -> None:
    for stages in (2,) if schedule == "zbv" else (2, 3):
        config = ParallelConfig(pipeline=pipeline, schedule=schedule, virtual_stages=stages)
        for micro_batches in (pipeline, 2 * pipeline, 5 * pipeline):
            for rank in range(pipeline):
                here = passes_in_flight(config, rank, micro_batches)
                # torch lays zbv out for 2 ranks - 1 micro-batches, and of fewer leaves out those that are not there.
                fewer = schedule == "zbv" and micro_batches < 2 * pipeline - 1
                there = counted(config, rank, micro_batches)
                assert here >= there if fewer else here == there, (stages, micro_batches, rank)


def test_schedules_with_one_stage_per_rank() -> None:
    """Gpipe runs all forward passes first; 1F1B as many as there are ranks to come, itself included."""
    gpipe, in_turn = (ParallelConfig(pipeline=4, schedule=schedule) for schedule in ("gpipe", "1f1b"))
    assert [passes_in_flight(gpipe, rank, 7) for rank in range(4)] == [7] * 4
    assert [passes_in_flight(in_turn, rank, 7) for rank in range(4)] == [4, 3, 2, 1]
    assert passes_in_flight(in_turn, 0, 2) == 2
    assert passes_in_flight(ParallelConfig(), 0, 7) == 1
