"""metrics.jsonl of a run that was killed repeatedly equals that of an uninterrupted run."""

import os
import random
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.runtime.errors import DataError, StorageError
from hlat.tracking import EventLog, MetricsFile, read_events, read_metrics
from hlat.tracking.jsonl import encode

STEPS, CHECKPOINT_EVERY = 4000, 100


def line(step: int) -> dict[str, object]:
    """Return the metrics of a deterministic run at a step; lines differ in length."""
    return {"step": step, "loss": 1 / step, "seconds": {"data": 0.25}, "filler": "x" * (step * 37 % 500)}


def train(path: Path, start: int) -> None:
    """Log the steps of a run from ``start`` on."""
    file = MetricsFile(path, start_step=start)
    for step in range(start + 1, STEPS + 1):
        file.append(line(step))
    file.close()


def killed_after(seconds: float, path: Path, start: int) -> bool:
    """Return True if a process that logs from ``start`` on was killed before its end, after seconds of its own work.

    Python does not see SIGPROF: it ends the process as SIGKILL does, at any instruction.
    """
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        train(path, start)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGPROF


def test_the_file_of_a_run_killed_repeatedly_equals_that_of_an_uninterrupted_run(tmp_path: Path) -> None:
    straight, path, rng = tmp_path / "straight.jsonl", tmp_path / "killed.jsonl", random.Random(0)
    train(straight, 0)
    start = kills = 0
    while kills < 30:
        if killed_after(rng.uniform(1e-5, 0.02), path, start):
            kills += 1
        else:  # it has come to its end: from the beginning
            assert path.read_bytes() == straight.read_bytes()
            path.unlink()
        # The newest checkpoint that a resume could load; later steps are repeated.
        logged = max((record["step"] for record in read_metrics(path)), default=0) if path.exists() else 0
        start = max(0, logged // CHECKPOINT_EVERY - rng.randrange(3)) * CHECKPOINT_EVERY
    train(path, start)
    assert path.read_bytes() == straight.read_bytes()


@given(st.lists(st.integers(1, 50), unique=True).map(sorted), st.integers(0, 60))
def test_a_resume_keeps_exactly_the_steps_up_to_the_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], start: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_bytes(b"".join(encode({"step": step}) for step in steps) + b'{"step"')
    MetricsFile(path, start_step=start).close()
    assert [record["step"] for record in read_metrics(path)] == [step for step in steps if step <= start]


def test_the_file_is_not_rewritten_if_no_line_is_dropped(tmp_path: Path) -> None:
    """A resume on an almost full disk must not need space for a copy."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode({"step": 1}) + encode({"step": 2}))
    inode = path.stat().st_ino
    MetricsFile(path, start_step=2).close()
    assert path.stat().st_ino == inode


def test_damaged_lines_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode({"step": 1}) + b"\x00\x00\n[1]\n{}\n" + encode({"step": 2}))
    file = MetricsFile(path, start_step=5)
    file.append({"step": 6})
    file.close()
    assert file.unreadable == 3
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 6]


def test_reading_a_missing_run_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot read: No such file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_events_are_never_truncated_and_have_the_time_of_the_clock(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for part, now in enumerate([0.0, 1_800_000_000.125]):
        log = EventLog(path, clock=lambda now=now: now)
        log.append("start" if part == 0 else "resume", step=part * 10, changes=[{"path": "optimizer.lr", "old": 1e-3}])
        log.close()
        with path.open("ab") as file:
            file.write(b'{"time": "2026')  # killed while writing the next one
    first, second = read_events(path)
    assert first == {
        "time": "1970-01-01T00:00:00.000+00:00",
        "event": "start",
        "step": 0,
        "changes": [{"path": "optimizer.lr", "old": 1e-3}],
    }
    assert (second["time"], second["event"], second["step"]) == ("2027-01-15T08:00:00.125+00:00", "resume", 10)


@pytest.mark.parametrize("bracket", [b"[", b'{"a":'])
def test_a_line_of_deeply_nested_brackets_is_a_damaged_line(tmp_path: Path, bracket: bytes) -> None:
    """Python's parser raises RecursionError for them, not ValueError."""
    path = tmp_path / "metrics.jsonl"
    nested = bracket * 100_000
    path.write_bytes(encode({"step": 1}) + nested + b"\n" + encode({"step": 2}) + nested)
    file = MetricsFile(path, start_step=2)
    assert file.unreadable == 1
    file.close()
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    events = tmp_path / "events.jsonl"
    events.write_bytes(nested + b"\n" + nested)
    log = EventLog(events)
    log.append("start")
    log.close()
    with pytest.raises(DataError, match=r"events\.jsonl, line 1: .* is not a JSON object"):
        read_events(events)
