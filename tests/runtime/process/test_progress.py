"""Progress records: a process that waits for the system is not silent, one that is stopped or does nothing is."""

import errno
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from hlat.runtime.process import is_stopped, process_state
from hlat.runtime.progress import ProgressRecord, advance, blocking_call, record_progress_in


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def record(clock):
    record = ProgressRecord(memoryview(bytearray(ProgressRecord.BYTES)), clock)
    record_progress_in(record)
    yield record
    record_progress_in(None)


def test_silence_counts_from_the_last_progress_and_from_the_request(record, clock):
    advance()
    clock.now += 7
    assert record.silence(since=0.0) == 7
    assert record.silence(since=clock.now - 3) == 3, "nothing was expected before"


def test_a_call_that_waits_for_the_system_is_no_silence_until_its_limit(record, clock):
    with blocking_call(), blocking_call():
        clock.now += ProgressRecord.BLOCKED_LIMIT - 1
        assert record.silence(0.0) == 0 and record.blocked_seconds == ProgressRecord.BLOCKED_LIMIT - 1
        clock.now += 2
        assert record.silence(0.0) == ProgressRecord.BLOCKED_LIMIT + 1
    assert record.blocked_seconds == 0
    clock.now += 5
    assert record.silence(0.0) == 5, "counted from its end"


def test_an_exception_ends_a_blocking_call(record):
    with pytest.raises(OSError, match="full"), blocking_call():
        raise OSError("full")
    assert record.blocked_seconds == 0


def test_a_stopped_process_is_silent_although_its_call_waits_for_the_system(record, clock):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process, blocking_call():
        clock.now += 9
        assert record.silence(0.0, process.pid) == 0
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid) and record.silence(0.0, process.pid) == 9
        process.kill()


def test_a_process_that_computes_is_not_silent(record, clock):
    """It may wait for a processor for long: its state is R then, too."""
    clock.now += 9
    assert process_state(os.getpid()) == "R" and record.silence(0.0, os.getpid()) == 0
    assert record.silence(0.0) > 9


def test_a_process_that_ended_inside_a_blocking_call_is_silent(record, clock):
    """Its call is never counted as ended; as a zombie it still has an id."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process, blocking_call():
        clock.now += 9
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(process.pid) == "Z" and record.silence(0.0, process.pid) == 9
        process.wait()
        assert record.silence(0.0, process.pid) == 9


def test_a_record_needs_no_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with ProgressRecord.open_file() as file:
        ProgressRecord.in_file(file).advance()
        assert ProgressRecord.in_file(file).silence(0.0) < ProgressRecord.BLOCKED_LIMIT


def test_a_record_on_a_full_disk_is_an_error_not_a_killed_process(monkeypatch):
    def raise_no_space(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", raise_no_space)
    with ProgressRecord.open_file() as file, pytest.raises(OSError, match="No space left"):
        ProgressRecord.in_file(file)
