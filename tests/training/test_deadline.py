"""A run stops in time to save: at its own deadline, and before the end of its Slurm job."""

import pytest

from hlat.config import RecoveryConfig
from hlat.runtime import DEADLINE
from hlat.training.deadline import Deadline


class Clock:
    """Seconds since 1970, moved by hand."""

    def __init__(self):
        self.now = 1e9

    def __call__(self):
        return self.now


def deadline(clock, environment=None, seconds=None, longest_save=0.0):
    return Deadline(RecoveryConfig(deadline_seconds=seconds), lambda: longest_save, environment or {}, clock)


def comes_after(one, clock, begin=1e9):
    """Seconds until it has come."""
    for second in range(10_000):
        clock.now = begin + second
        if one.has_come:
            return second
    return None


def test_without_one_it_never_comes():
    clock = Clock()
    assert comes_after(deadline(clock), clock) is None


def test_it_is_counted_from_the_start_of_the_process_where_nobody_supervises():
    clock = Clock()
    assert comes_after(deadline(clock, seconds=100), clock) == 100


def test_a_supervisor_counts_from_the_start_of_the_command():
    clock = Clock()
    assert comes_after(deadline(clock, {DEADLINE: str(1e9 + 40)}, seconds=100), clock) == 40


@pytest.mark.parametrize(("longest_save", "margin"), [(0, 60), (10, 60), (100, 200)])
def test_of_a_slurm_job_there_is_time_left_for_twice_the_longest_save(longest_save, margin):
    clock = Clock()
    one = deadline(clock, {"SLURM_JOB_END_TIME": str(int(1e9) + 3600)}, longest_save=longest_save)
    assert comes_after(one, clock) == 3600 - margin


def test_what_is_not_a_time_is_no_deadline():
    clock = Clock()
    assert comes_after(deadline(clock, {"SLURM_JOB_END_TIME": "UNLIMITED"}), clock) is None
