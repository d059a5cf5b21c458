"""The simulated pipeline: the papers' formulas where they hold, and what must hold of any order."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from hlat.activation_checkpointing.in_flight import passes_in_flight
from hlat.config.sections import ParallelConfig
from hlat.parallel.stages import order_of
from hlat.planner.cost import StageTimes, simulate_pipeline

EACH = {"1f1b": 1, "gpipe": 1, "interleaved-1f1b": 2, "interleaved-zero-bubble": 2, "zbv": 2}
TORCH = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
KINDS = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "input", "BACKWARD_WEIGHT": "weight"}


def equal(stages, forward=1.0, backward=2.0, message=0.0):
    """The same times for all stages; half of backward is for weights."""
    return StageTimes([forward] * stages, [backward] * stages, [backward / 2] * stages, message)


def place_of(schedule, stage, ranks):
    turn, index = divmod(stage, ranks)
    return ranks - 1 - index if schedule == "zbv" and turn % 2 else index


@pytest.mark.parametrize(("ranks", "count"), [(1, 4), (2, 2), (4, 4), (4, 16), (8, 32)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_take_what_narayanan_says(schedule, ranks, count):
    """(m + p - 1) (F + B), Narayanan et al. 2021, section 2.2."""
    line = simulate_pipeline(schedule, ranks, count, equal(ranks))
    assert line.seconds == pytest.approx((count + ranks - 1) * 3.0)


@pytest.mark.parametrize(("ranks", "count", "each"), [(2, 4, 2), (4, 8, 2), (4, 16, 3), (8, 32, 4)])
def test_interleaving_divides_the_bubble(ranks, count, each):
    """Bubble (p - 1) (F + B) / v, the same paper, section 2.2.2."""
    stages = ranks * each
    line = simulate_pipeline("interleaved-1f1b", ranks, count, equal(stages, 1.0 / each, 2.0 / each))
    assert line.seconds == pytest.approx(count * 3.0 + (ranks - 1) * 3.0 / each)


def test_the_slowest_stage_sets_the_pace():
    line = simulate_pipeline("1f1b", 4, 64, StageTimes([1.0, 1.0, 1.0, 1.5], [2.0, 2.0, 2.0, 3.0], [0.0] * 4))
    assert line.seconds == pytest.approx(64 * 4.5 + 3 * 3.0)
    assert line.busy(3) == pytest.approx(64 * 4.5)


def test_messages_delay_what_waits_for_them():
    quiet, slow = (simulate_pipeline("1f1b", 4, 8, equal(4, message=message)).seconds for message in (0.0, 0.25))
    assert slow >= quiet + 2 * 3 * 0.25  # down the pipeline and back


@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (4, 16), (8, 32)])
def test_a_v_of_equal_passes_has_next_to_no_bubble(ranks, count):
    """Qi et al. 2024, section 6, if F = B = W: none but what it takes to reach the last rank first."""
    line = simulate_pipeline("zbv", ranks, count, equal(2 * ranks, 0.5, 1.0))
    assert line.seconds == pytest.approx(count * 3.0 + (ranks - 1) * 0.5)
    whole = simulate_pipeline("1f1b", ranks, count, equal(ranks)).seconds
    interleaved = simulate_pipeline("interleaved-1f1b", ranks, count, equal(2 * ranks, 0.5, 1.0)).seconds
    split = simulate_pipeline("interleaved-zero-bubble", ranks, count, equal(2 * ranks, 0.5, 1.0)).seconds
    assert line.seconds <= split < interleaved < whole


@pytest.mark.parametrize("schedule", TORCH)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_orders_are_torchs(schedule, ranks):
    for each in (2,) if schedule == "zbv" else (2, 3):
        stages = ranks * each
        for count in (ranks, ranks + 1, 2 * ranks, 5 * ranks):
            for rank in range(ranks):
                group = {"group_size": ranks, "group_rank": rank, "num_stages": stages, "submod": None}
                mine = [stage for stage in range(stages) if place_of(schedule, stage, ranks) == rank]
                fakes = [
                    SimpleNamespace(stage_index=i, is_first=i == 0, is_last=i == stages - 1, **group) for i in mine
                ]
                order = TORCH[schedule](fakes, count, loss_fn=lambda *_: None).pipeline_order[rank]
                theirs = [
                    (KINDS[one.computation_type.name], one.stage_index, one.microbatch_index)
                    for one in order
                    if one is not None
                ]
                assert order_of(schedule, rank, ranks, count, each) == theirs


@given(
    schedule=st.sampled_from(sorted(EACH)),
    ranks=st.integers(1, 5),
    rounds=st.integers(1, 3),
    each=st.integers(2, 3),
    data=st.data(),
)
def test_every_pass_runs_once_after_what_it_needs(schedule, ranks, rounds, each, data):
    each = each if schedule.startswith("interleaved") else EACH[schedule]
    count, stages = ranks * rounds, ranks * each
    times = st.lists(st.floats(0.1, 3.0), min_size=stages, max_size=stages)
    forward, weight, rest = data.draw(times), data.draw(times), data.draw(times)
    backward, message = [a + b for a, b in zip(weight, rest, strict=True)], data.draw(st.floats(0.0, 1.0))
    line = simulate_pipeline(schedule, ranks, count, StageTimes(forward, backward, weight, message))
    passes = {(one.kind, one.stage, one.micro_batch): one for rank in line.ranks for one in rank}
    before = {later: one.stop for rank in line.ranks for one, later in pairwise(rank)}
    kinds = {"forward", "input", "weight"} if "weight" in {kind for kind, *_ in passes} else {"forward", "backward"}
    assert len(passes) == len(kinds) * stages * count == sum(map(len, line.ranks))
    for (kind, stage, batch), one in passes.items():
        assert one.rank == place_of(schedule, stage, ranks)
        length = {"forward": forward, "backward": backward, "weight": weight, "input": rest}[kind][stage]
        assert one.stop - one.start == pytest.approx(length)
        back = "backward" if "backward" in kinds else "input"
        if kind == "forward":
            needed = passes.get(("forward", stage - 1, batch))
        elif kind == "weight":
            needed = passes["input", stage, batch]
        else:
            needed = passes["forward", stage, batch] if stage == stages - 1 else passes[back, stage + 1, batch]
        arrived = 0.0 if needed is None else needed.stop + (message if needed.rank != one.rank else 0.0)
        assert one.start == pytest.approx(max(before.get(one, 0.0), arrived)), "nothing waits without a reason"
    for rank in line.ranks:
        assert all(a.stop <= b.start + 1e-9 for a, b in pairwise(rank))


@pytest.mark.parametrize("schedule", EACH)
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 12)])
def test_as_many_passes_are_in_flight_as_memory_is_planned_for(schedule, ranks, count):
    config = ParallelConfig(pipeline=ranks, schedule=schedule)
    line = simulate_pipeline(schedule, ranks, count, equal(ranks * EACH[schedule]))
    for rank, passes in enumerate(line.ranks):
        alive = most = 0
        for one in passes:
            alive += (one.kind == "forward") - (one.kind in ("backward", "weight"))
            most = max(most, alive)
        assert most == passes_in_flight(config, rank, count)
