"""Ends of a run from outside: a deadline, in time to save, and signals, of which a second one stops it at once."""

import signal
import subprocess
import sys
import time

import pytest

from hlat.config.sections.operation import RecoveryConfig
from hlat.launch.supervision.supervisor import _deadline
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.process import DEADLINE_ENV
from hlat.training.interruptions import Deadline, StopRequest

SINCE_1970 = 1e9
SINCE_BOOT = 5e3


class Clock:
    """Clock of the machine, advanced by hand, and the time of day, which can be set."""

    def __init__(self):
        self.now, self.was_set_by = SINCE_BOOT, 0.0

    def __call__(self):
        return self.now

    def time_of_day(self):
        return SINCE_1970 + (self.now - SINCE_BOOT) + self.was_set_by


def deadline(clock, environment=None, seconds=None, longest_save=0.0):
    recovery = RecoveryConfig(deadline_seconds=seconds)
    return Deadline(recovery, lambda: longest_save, environment or {}, clock, clock.time_of_day)


def comes_after(limit, clock):
    """Return the seconds until the deadline has passed."""
    for second in range(10_000):
        clock.now = SINCE_BOOT + second
        if limit.has_passed:
            return second
    return None


def test_without_a_deadline_it_never_passes():
    clock = Clock()
    assert comes_after(deadline(clock), clock) is None


def test_without_a_supervisor_the_deadline_counts_from_the_start_of_the_process():
    clock = Clock()
    assert comes_after(deadline(clock, seconds=100), clock) == 100


def test_a_supervisor_counts_the_deadline_from_the_start_of_the_command():
    clock = Clock()
    assert comes_after(deadline(clock, {DEADLINE_ENV: str(SINCE_BOOT + 40)}, seconds=100), clock) == 40


@pytest.mark.parametrize(("longest_save", "margin"), [(0, 60), (10, 60), (100, 200)])
def test_the_deadline_of_a_slurm_job_leaves_twice_the_longest_save(longest_save, margin):
    clock = Clock()
    limit = deadline(clock, {"SLURM_JOB_END_TIME": str(int(SINCE_1970) + 3600)}, longest_save=longest_save)
    assert comes_after(limit, clock) == 3600 - margin


@pytest.mark.parametrize("set_by", [-3600.0, 86400.0], ids=["an hour back", "a day forward"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"seconds": 100}, 100),
        ({"seconds": 100, "environment": {DEADLINE_ENV: str(SINCE_BOOT + 40)}}, 40),
        ({"environment": {"SLURM_JOB_END_TIME": str(int(SINCE_1970) + 3600)}}, 3600 - 60),
    ],
    ids=["alone", "supervised", "Slurm"],
)
def test_setting_the_system_clock_does_not_move_the_deadline(given, expected, set_by):
    clock = Clock()
    limit = deadline(clock, **given)
    clock.was_set_by = set_by
    assert comes_after(limit, clock) == expected


def test_a_supervisor_and_its_attempts_use_the_same_clock():
    """Deadlines use a monotonic clock that all processes of the machine share."""
    left = _deadline(RecoveryConfig(deadline_seconds=50_000))
    assert left is not None
    script = "from hlat.runtime.progress import machine_clock; print(machine_clock())"
    there = float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert 0 < left - there < 50_000 < abs(left - time.time())


def test_an_invalid_time_is_no_deadline():
    clock = Clock()
    assert comes_after(deadline(clock, {"SLURM_JOB_END_TIME": "UNLIMITED"}), clock) is None


class SteppedClock:
    """SteppedClock that is set by hand; it starts at zero, as on a machine that has just booted."""

    now = 0.25

    def __call__(self) -> float:
        return self.now


def test_the_first_signal_is_a_request_and_a_later_one_an_interrupt() -> None:
    clock, told = SteppedClock(), list[str]()
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(HostGroup(), told.append, clock=clock) as stop:
        stop.start_vote()
        assert stop.vote_result() is None and not told
        signal.raise_signal(signal.SIGTERM)
        assert stop.vote_result() == "SIGTERM" and told == ["SIGTERM"]
        clock.now += 0.9
        signal.raise_signal(signal.SIGUSR1)
        assert stop.vote_result() == "SIGTERM" and told == ["SIGTERM"], "a scheduler's, passed on by the launcher"
        clock.now += 0.2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert stop.vote_result() == "SIGTERM" and told == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_after_the_last_vote_comes_again_where_the_run_goes_on() -> None:
    """Between two stages: what asked for a stop while the first one ended is not forgotten."""
    received = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        for goes_on in (False, True):
            with StopRequest(HostGroup(), lambda name: None) as stop:
                assert not goes_on or stop.late_vote() is None
                signal.raise_signal(signal.SIGTERM)
            assert received == [signal.SIGTERM] * goes_on
        with StopRequest(HostGroup(), lambda name: None) as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop.late_vote() == "SIGTERM"
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ignored_signals_stay_ignored_and_a_deadline_is_reported_as_such() -> None:
    told, is_over = list[str](), [False]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(HostGroup(), told.append, lambda: is_over[0], SteppedClock()) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.vote_result() is None and not told
            is_over[0] = True
            assert stop.vote_result() == "deadline"
            signal.raise_signal(signal.SIGUSR1)
            assert stop.vote_result() == "SIGUSR1", "a signal comes first"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
