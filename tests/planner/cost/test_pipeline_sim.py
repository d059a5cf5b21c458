"""The pipeline simulation: the formulas of papers where they apply, and properties of every schedule."""

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

from hlat.activation_checkpointing.plan import passes_in_flight
from hlat.config.sections.training import ParallelConfig
from hlat.parallel.stages.in_flight import pass_order
from hlat.planner.cost.step_time import StageTimes, simulate_pipeline

EACH = {"1f1b": 1, "gpipe": 1, "interleaved-1f1b": 2, "interleaved-zero-bubble": 2, "zbv": 2}
TORCH = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
KINDS = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "input", "BACKWARD_WEIGHT": "weight"}


def equal(stages, forward=1.0, backward=2.0, message=0.0):
    """Equal times for all stages; half of backward computes gradients of weights."""
    return StageTimes([forward] * stages, [backward] * stages, [backward / 2] * stages, message)


def rank_of_stage(schedule, stage, ranks):
    round_, index = divmod(stage, ranks)
    return ranks - 1 - index if schedule == "zbv" and round_ % 2 else index


@pytest.mark.parametrize(("ranks", "count"), [(1, 4), (2, 2), (4, 4), (4, 16), (8, 32)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_take_the_time_of_narayanans_formula(schedule, ranks, count):
    """(m + p - 1) (F + B), Narayanan et al. 2021, section 2.2."""
    timeline = simulate_pipeline(schedule, ranks, count, equal(ranks))
    assert timeline.seconds == pytest.approx((count + ranks - 1) * 3.0)


@pytest.mark.parametrize(("ranks", "count", "each"), [(2, 4, 2), (4, 8, 2), (4, 16, 3), (8, 32, 4)])
def test_interleaving_divides_the_bubble(ranks, count, each):
    """Bubble (p - 1) (F + B) / v: Narayanan et al. 2021, section 2.2.2."""
    stages = ranks * each
    timeline = simulate_pipeline("interleaved-1f1b", ranks, count, equal(stages, 1.0 / each, 2.0 / each))
    assert timeline.seconds == pytest.approx(count * 3.0 + (ranks - 1) * 3.0 / each)


def test_the_slowest_stage_sets_the_pace():
    timeline = simulate_pipeline("1f1b", 4, 64, StageTimes([1.0, 1.0, 1.0, 1.5], [2.0, 2.0, 2.0, 3.0], [0.0] * 4))
    assert timeline.seconds == pytest.approx(64 * 4.5 + 3 * 3.0)
    assert timeline.busy(3) == pytest.approx(64 * 4.5)


def test_messages_delay_the_passes_that_need_them():
    quiet, slow = (simulate_pipeline("1f1b", 4, 8, equal(4, message=message)).seconds for message in (0.0, 0.25))
    assert slow >= quiet + 2 * 3 * 0.25  # down the pipeline and back


@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (4, 16), (8, 32)])
def test_zbv_with_equal_passes_has_almost_no_bubble(ranks, count):
    """Qi et al. 2024, section 6, for F = B = W: no bubble but the time to reach the last rank."""
    timeline = simulate_pipeline("zbv", ranks, count, equal(2 * ranks, 0.5, 1.0))
    assert timeline.seconds == pytest.approx(count * 3.0 + (ranks - 1) * 0.5)
    plain = simulate_pipeline("1f1b", ranks, count, equal(ranks)).seconds
    interleaved = simulate_pipeline("interleaved-1f1b", ranks, count, equal(2 * ranks, 0.5, 1.0)).seconds
    split = simulate_pipeline("interleaved-zero-bubble", ranks, count, equal(2 * ranks, 0.5, 1.0)).seconds
    assert timeline.seconds <= split < interleaved < plain


@pytest.mark.parametrize("schedule", TORCH)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pass_orders_equal_those_of_torch(schedule, ranks):
    for each in (2,) if schedule == "zbv" else (2, 3):
        stages = ranks * each
        for count in (ranks, ranks + 1, 2 * ranks, 5 * ranks):
            for rank in range(ranks):
                group = {"group_size": ranks, "group_rank": rank, "num_stages": stages, "submod": None}
                mine = [stage for stage in range(stages) if rank_of_stage(schedule, stage, ranks) == rank]
                fakes = [
                    SimpleNamespace(stage_index=i, is_first=i == 0, is_last=i == stages - 1, **group) for i in mine
                ]
                order = TORCH[schedule](fakes, count, loss_fn=lambda *_: None).pipeline_order[rank]
                torch_order = [
                    (KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
                    for action in order
                    if action is not None
                ]
                assert pass_order(schedule, rank, ranks, count, each) == torch_order


@given(
    schedule=st.sampled_from(sorted(EACH)),
    ranks=st.integers(1, 5),
    rounds=st.integers(1, 3),
    each=st.integers(2, 3),
    data=st.data(),
)
def test_every_pass_runs_once_and_after_its_inputs(schedule, ranks, rounds, each, data):
    each = each if schedule.startswith("interleaved") else EACH[schedule]
    count, stages = ranks * rounds, ranks * each
    times = st.lists(st.floats(0.1, 3.0), min_size=stages, max_size=stages)
    forward, weight, rest = data.draw(times), data.draw(times), data.draw(times)
    backward, message = [a + b for a, b in zip(weight, rest, strict=True)], data.draw(st.floats(0.0, 1.0))
    timeline = simulate_pipeline(schedule, ranks, count, StageTimes(forward, backward, weight, message))
    passes = {
        (each_pass.kind, each_pass.stage, each_pass.micro_batch): each_pass
        for rank in timeline.ranks
        for each_pass in rank
    }
    before = {later: each_pass.stop for rank in timeline.ranks for each_pass, later in pairwise(rank)}
    kinds = {"forward", "input", "weight"} if "weight" in {kind for kind, *_ in passes} else {"forward", "backward"}
    assert len(passes) == len(kinds) * stages * count == sum(map(len, timeline.ranks))
    for (kind, stage, batch), each_pass in passes.items():
        assert each_pass.rank == rank_of_stage(schedule, stage, ranks)
        length = {"forward": forward, "backward": backward, "weight": weight, "input": rest}[kind][stage]
        assert each_pass.stop - each_pass.start == pytest.approx(length)
        back = "backward" if "backward" in kinds else "input"
        if kind == "forward":
            needed = passes.get(("forward", stage - 1, batch))
        elif kind == "weight":
            needed = passes["input", stage, batch]
        else:
            needed = passes["forward", stage, batch] if stage == stages - 1 else passes[back, stage + 1, batch]
        arrived = 0.0 if needed is None else needed.stop + (message if needed.rank != each_pass.rank else 0.0)
        assert each_pass.start == pytest.approx(max(before.get(each_pass, 0.0), arrived)), (
            "a pass starts as soon as its rank and its input are ready"
        )
    for rank in timeline.ranks:
        assert all(a.stop <= b.start + 1e-9 for a, b in pairwise(rank))


@pytest.mark.parametrize("schedule", EACH)
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 12)])
def test_passes_in_flight_equal_the_number_that_memory_is_planned_for(schedule, ranks, count):
    config = ParallelConfig(pipeline=ranks, schedule=schedule)
    timeline = simulate_pipeline(schedule, ranks, count, equal(ranks * EACH[schedule]))
    for rank, passes in enumerate(timeline.ranks):
        in_flight = peak = 0
        for each_pass in passes:
            in_flight += (each_pass.kind == "forward") - (each_pass.kind in ("backward", "weight"))
            peak = max(peak, in_flight)
        assert peak == passes_in_flight(config, rank, count)
