"""Watchdog: a hang is found when a phase exceeds its learned time limit, and the causing rank is reported."""

from dataclasses import replace

import pytest

from hlat.resilience import Watchdog
from hlat.resilience.watchdog import FIRST_TIME
from hlat.runtime.progress import ProgressRecord
from tests.support.resilience.readings import reading

KNOWN = dict.fromkeys(("data", "forward", "backward", "reduce", "optimizer", "checkpoint"), 1.0)
NOW = 1000.0


def check(*beats, seconds=20.0, stopped=(), now=NOW):
    return Watchdog(seconds).check(beats, now, lambda rank: rank in stopped)


def waits(rank, phase="reduce", step=6, location="parallel/data_parallel.py:9 sum_over_world", since=900.0):
    return reading(
        rank, phase=phase, step=step, since=since, alive_at=NOW, waiting=True, location=location, longest=KNOWN
    )


def works(rank, phase="forward", step=6, since=900.0):
    return reading(rank, phase=phase, step=step, since=since, alive_at=NOW, longest=KNOWN)


@pytest.mark.parametrize(
    ("phase", "longest", "limit"),
    [
        ("forward", 0.5, 20.0),  # the minimum
        ("checkpoint", 30.0, 300.0),  # ten times the longest
        ("backward", None, FIRST_TIME),  # it may compile
        ("saving", None, 20.0),  # fed by the progress of the saver
        ("saving", 500.0, 20.0),
        ("start", None, None),
        ("end", 1.0, None),
    ],
)
def test_time_limits_are_learned(phase, longest, limit):
    watchdog = Watchdog(20.0)
    learned = {} if longest is None else {phase: longest}
    assert watchdog.check([reading(longest=learned, phase="start")], NOW, lambda rank: False) is None
    watchdog.check([reading(longest=dict.fromkeys(learned, 0.1), phase="start")], NOW, lambda rank: False)
    assert watchdog.limit(phase) == limit, "the longest of all attempts counts"


def test_a_phase_beyond_its_time_limit_is_a_hang():
    assert check(works(0, since=NOW - 19.9)) is None
    found = check(works(0, since=NOW - 20.1))
    assert (found.ranks, found.phase, found.step) == ([0], "forward", 7)
    assert found.seconds == pytest.approx(20.1) and found.why.startswith("training/loop.py")
    assert check(works(0, since=0.0), seconds=None) is None, "the watchdog is disabled"


def test_a_stopped_rank_is_blamed_first():
    found = check(waits(0), works(1), waits(2), stopped={2})
    assert (found.ranks, found.phase, found.why) == ([2], "reduce", "stopped by a signal")


def test_a_rank_that_does_not_respond_is_blamed_before_working_ranks():
    silent = reading(2, phase="backward", step=6, since=900.0, alive_at=NOW - 30, longest=KNOWN)
    found = check(waits(0), works(1), silent)
    assert (found.ranks, found.phase) == ([2], "backward") and "does not respond" in found.why


def test_a_rank_that_does_not_wait_is_blamed_before_waiting_ranks():
    found = check(waits(0), works(1, phase="data"), waits(2), waits(3))
    assert (found.ranks, found.phase, found.step) == ([1], "data", 7)
    assert "waits for no other rank" in found.why


def test_if_all_ranks_wait_the_one_with_the_least_progress_is_blamed():
    assert check(waits(0, step=7), waits(1, phase="optimizer", step=6), waits(2, step=7)).ranks == [1]
    assert check(waits(0), waits(1, phase="backward"), waits(2)).ranks == [1]


def test_at_equal_progress_the_rank_that_waits_elsewhere_is_blamed():
    found = check(
        waits(0, "forward"), waits(1, "backward", location="parallel/tensor_parallel.py:3 hook"), waits(2, "forward")
    )
    assert (
        found.ranks == [1]
        and "parallel/tensor_parallel.py:3 hook while the others wait in parallel/data_parallel.py" in found.why
    )


def test_if_ranks_cannot_be_distinguished_all_are_blamed():
    assert check(waits(0), waits(1)).ranks == [0, 1]
    found = check(waits(0), waits(1, location="parallel/tensor_parallel.py:3 hook"))
    assert found.ranks == [0, 1] and "rank 1 in parallel/tensor_parallel.py:3 hook" in found.why, "no majority of two"


def saves(rank, since=NOW - 500.0, **fields):
    return reading(rank, phase="saving", since=since, alive_at=NOW, longest=KNOWN | {"saving": 400.0}, **fields)


def test_a_wait_for_a_save_is_limited_from_its_last_progress_however_long_others_took():
    assert check(saves(0, progress_at=NOW - 19.9)) is None
    assert check(saves(0, progress_at=NOW - 20.1)).phase == "saving"
    assert check(saves(0, progress_at=NOW - 600.0, since=NOW - 19.9)) is None, "the wait has just begun"


def test_a_rank_that_waits_for_its_disk_does_not_hang_until_the_limit_of_such_a_call():
    blocked = works(0, phase="checkpoint")
    assert check(replace(blocked, blocked=True, progress_at=NOW - 600.0)) is None
    assert (
        check(replace(blocked, blocked=True, progress_at=NOW - ProgressRecord.BLOCKED_LIMIT - 1, since=NOW - 1900.0))
        is not None
    )
    assert check(replace(blocked, progress_at=NOW - 600.0)) is not None


def test_ranks_that_wait_for_the_slow_disk_of_another_do_not_hang():
    slow = replace(works(0, phase="checkpoint"), blocked=True, progress_at=NOW - 50.0)
    assert check(slow, waits(1, phase="checkpoint")) is None
    assert check(slow, works(1, phase="backward")).ranks == [1], "a rank that does not wait hangs nevertheless"


def test_a_thread_may_wait_for_the_batch_that_another_rank_reads():
    reads = replace(works(0, phase="data"), progress_at=NOW - 1.0)
    assert check(reads, works(1, phase="data")) is None
