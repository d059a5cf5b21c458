"""The simulated pipeline: the papers' formulas where they hold, and what must hold of any order."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.config import ParallelConfig
from hlat.memory import passes_in_flight
from hlat.planner.pipeline import simulate
from hlat.runtime import PlanError


@pytest.mark.parametrize(("ranks", "count"), [(1, 4), (2, 2), (4, 4), (4, 16), (8, 32)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_take_what_narayanan_says(schedule, ranks, count):
    """(m + p - 1) (F + B), Narayanan et al. 2021, section 2.2."""
    line = simulate(schedule, ranks, count, [1.0] * ranks, [2.0] * ranks)
    assert line.seconds == pytest.approx((count + ranks - 1) * 3.0)


@pytest.mark.parametrize(("ranks", "count", "each"), [(2, 4, 2), (4, 8, 2), (4, 16, 3), (8, 32, 4)])
def test_interleaving_divides_the_bubble(ranks, count, each):
    """Bubble (p - 1) (F + B) / v, the same paper, section 2.2.2."""
    stages = ranks * each
    line = simulate("interleaved-1f1b", ranks, count, [1.0 / each] * stages, [2.0 / each] * stages)
    assert line.seconds == pytest.approx(count * 3.0 + (ranks - 1) * 3.0 / each)


def test_the_slowest_stage_sets_the_pace():
    line = simulate("1f1b", 4, 64, [1.0, 1.0, 1.0, 1.5], [2.0, 2.0, 2.0, 3.0])
    assert line.seconds == pytest.approx(64 * 4.5 + 3 * 3.0)
    assert line.busy(3) == pytest.approx(64 * 4.5)


def test_messages_delay_what_waits_for_them():
    quiet, slow = (simulate("1f1b", 4, 8, [1.0] * 4, [2.0] * 4, message).seconds for message in (0.0, 0.25))
    assert slow >= quiet + 2 * 3 * 0.25  # down the pipeline and back


@given(
    schedule=st.sampled_from(["1f1b", "interleaved-1f1b", "gpipe"]),
    ranks=st.integers(1, 5),
    rounds=st.integers(1, 3),
    each=st.integers(2, 3),
    data=st.data(),
)
def test_every_pass_runs_once_after_what_it_needs(schedule, ranks, rounds, each, data):
    each = each if schedule == "interleaved-1f1b" else 1
    count, stages = ranks * rounds, ranks * each
    times = st.lists(st.floats(0.1, 3.0), min_size=stages, max_size=stages)
    forward, backward, message = data.draw(times), data.draw(times), data.draw(st.floats(0.0, 1.0))
    line = simulate(schedule, ranks, count, forward, backward, message)
    passes = {(one.forward, one.stage, one.micro_batch): one for rank in line.ranks for one in rank}
    assert len(passes) == 2 * stages * count == sum(map(len, line.ranks))
    for (ahead, stage, batch), one in passes.items():
        assert one.rank == stage % ranks
        assert one.stop - one.start == pytest.approx((forward if ahead else backward)[stage])
        if ahead and stage > 0:
            assert one.start >= passes[True, stage - 1, batch].stop + (message if ranks > 1 else 0) - 1e-9
        if not ahead:
            needed = passes[True, stage, batch] if stage == stages - 1 else passes[False, stage + 1, batch]
            assert one.start >= needed.stop - 1e-9
    for rank in line.ranks:
        assert all(a.stop <= b.start + 1e-9 for a, b in pairwise(rank))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "gpipe"])
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 12)])
def test_as_many_passes_are_in_flight_as_memory_is_planned_for(schedule, ranks, count):
    each = 2 if schedule == "interleaved-1f1b" else 1
    config = ParallelConfig(pipeline=ranks, schedule=schedule)
    line = simulate(schedule, ranks, count, [1.0] * ranks * each, [2.0] * ranks * each)
    for rank, passes in enumerate(line.ranks):
        alive = most = 0
        for one in passes:
            alive += 1 if one.forward else -1
            most = max(most, alive)
        assert most == passes_in_flight(config, rank, count)


def test_a_schedule_without_a_known_order_is_refused():
    with pytest.raises(PlanError, match="zbv"):
        simulate("zbv", 2, 4, [1.0] * 4, [2.0] * 4)
