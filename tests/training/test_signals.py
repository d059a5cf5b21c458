"""Stop signals: the first requests a stop after the step, more within a second count as one, a later one stops now."""

import signal

import pytest

from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.training.interruptions import StopRequest


class Clock:
    """Clock that is set by hand; it starts at zero, as on a machine that has just booted."""

    now = 0.25

    def __call__(self) -> float:
        return self.now


def test_the_first_signal_is_a_request_and_a_later_one_an_interrupt() -> None:
    clock, told = Clock(), list[str]()
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


def test_ignored_signals_stay_ignored_and_a_deadline_is_reported_as_such() -> None:
    told, is_over = list[str](), [False]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(HostGroup(), told.append, lambda: is_over[0], Clock()) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.vote_result() is None and not told
            is_over[0] = True
            assert stop.vote_result() == "deadline"
            signal.raise_signal(signal.SIGUSR1)
            assert stop.vote_result() == "SIGUSR1", "a signal comes first"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
