"""Positions of steps with skipped batches are a pure function; a new range moves no finished step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.config import BatchSchedule
from hlat.resilience.anomalies import SampleRange, SkippedSamples

BATCH = 8


def read_one_by_one(skipped_batches, steps):
    """Return the batches of the first steps, found by going through all batches."""
    read, batch = [], 0
    while len(read) < steps:
        if batch not in skipped_batches:
            read.append(batch * BATCH)
        batch += 1
    return read


@given(st.sets(st.integers(0, 30)), st.integers(1, 30))
def test_step_k_reads_the_kth_batch_that_is_not_skipped(skipped_batches, steps):
    skipped = SkippedSamples(
        BatchSchedule(BATCH), [SampleRange(batch * BATCH, (batch + 1) * BATCH) for batch in skipped_batches]
    )
    read = read_one_by_one(skipped_batches, steps)
    assert [skipped.next_step_start(done) for done in range(steps)] == read
    assert [skipped.position_after(done) for done in range(steps + 1)] == [0, *(first + BATCH for first in read)]


@given(st.sets(st.integers(0, 30)), st.integers(0, 30))
def test_the_skipped_batches_are_all_those_between_two_steps(skipped_batches, done):
    skipped = SkippedSamples(
        BatchSchedule(BATCH), [SampleRange(batch * BATCH, (batch + 1) * BATCH) for batch in skipped_batches]
    )
    assert list(skipped.skipped_after(done)) == list(
        range(skipped.position_after(done), skipped.next_step_start(done), BATCH)
    )


@given(st.sets(st.integers(0, 30)), st.integers(0, 20))
def test_skipping_a_batch_moves_no_earlier_step(skipped_batches, done):
    ranges = [SampleRange(batch * BATCH, (batch + 1) * BATCH) for batch in skipped_batches]
    before, after = SkippedSamples(BatchSchedule(BATCH), ranges), SkippedSamples(BatchSchedule(BATCH), ranges)
    first = before.next_step_start(done)
    after.add(SampleRange(first, first + BATCH))
    assert [after.next_step_start(k) for k in range(done)] == [before.next_step_start(k) for k in range(done)]
    assert [after.position_after(k) for k in range(done + 1)] == [before.position_after(k) for k in range(done + 1)]
    assert after.next_step_start(done) > first


@given(st.sets(st.integers(0, 30)), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), max_size=3))
def test_during_a_ramp_step_k_reads_the_kth_batch_that_is_not_skipped(skipped_batches, ramp):
    """A skipped batch keeps its place: the sizes of all other batches stay."""
    sizes = [size for count, size in ramp for _ in range(count)] + [BATCH] * 60
    ranges = [SampleRange(sum(sizes[:n]), sum(sizes[: n + 1])) for n in range(60)]
    skipped = SkippedSamples(
        BatchSchedule(BATCH, tuple(ramp), (1,) * (len(ramp) + 1)), [ranges[n] for n in skipped_batches]
    )
    read = [samples for n, samples in enumerate(ranges) if n not in skipped_batches]
    for done in range(20):
        before = ranges.index(read[done - 1]) + 1 if done else 0
        assert skipped.position_after(done) == sum(sizes[:before])
        assert skipped.next_step_start(done) == read[done].first
        assert skipped.tokens_of(done) == sum(stop - first for first, stop in read[:done])
        dropped = [first for first, _ in ranges[before : ranges.index(read[done])]]
        assert list(skipped.skipped_after(done)) == dropped


@pytest.mark.parametrize("wrong", [(-8, 0), (4, 12), (8, 24), (16, 24)])
def test_a_range_that_is_no_global_batch_is_refused(wrong):
    skipped = SkippedSamples(BatchSchedule(BATCH), [SampleRange(16, 24)])
    with pytest.raises(ValueError, match="no global batch"):
        skipped.add(SampleRange(*wrong))
