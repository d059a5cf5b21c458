"""Supervised attempts of real processes that fail in every way. They do not import torch, so they start quickly."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from hlat.config.sections.operation import RecoveryConfig
from hlat.launch import Supervision, Voice, launch_forked, supervise, worker_context
from hlat.launch.supervision import supervisor
from hlat.resilience import (
    HEARTBEAT_FOLDER,
    Goodput,
    Watchdog,
    WorldSizePolicy,
    record_durable_step,
    record_run_id,
    reset_durable_step,
    set_step_counter,
)
from hlat.resilience.goodput import GOODPUT_PARTS
from hlat.runtime.errors import DataError, StateLostError, StorageError
from hlat.runtime.process import REQUEUE_CODE
from hlat.runtime.progress import enter_phase
from hlat.runtime.storage.run_folder import EARLIER_ATTEMPT_ENV, ID_NAME
from tests.support.held import ahead_in_hangs
from tests.support.launch.launching import wait_for, wait_until, wait_until_gone


class Run:
    """A supervised process with one prescribed action per attempt; after these the run finishes."""

    def __init__(self, folder: Path, *attempts, saved=(), **recovery) -> None:
        self.folder, self._attempts, self._saved = folder, attempts, saved
        (folder / "run").mkdir(exist_ok=True)
        (folder / "run" / ID_NAME).write_text("run-a")
        self.messages: list[str] = []
        self.complaints: list[str] = []
        self._recovery = RecoveryConfig(**{"backoff_seconds": 0.05, **recovery})

    def _work(self) -> int:
        attempt = len(list(self.folder.glob("attempt-*")))
        (self.folder / f"attempt-{attempt}").write_text(str(os.getpid()))
        (self.folder / f"left-{attempt}").write_text(os.environ.get(EARLIER_ATTEMPT_ENV, ""))
        with worker_context():
            record_run_id("run-a")
            enter_phase("start")
            if attempt < len(self._attempts) and self._attempts[attempt] in BEFORE:
                return BEFORE[self._attempts[attempt]](self.folder)
            set_step_counter(lambda: 0)
            enter_phase("data")
            enter_phase("forward")
            if attempt < len(self._saved) and self._saved[attempt] is not None:
                record_durable_step(self._saved[attempt])
            time.sleep(0.01)
            return DURING[self._attempts[attempt]](self.folder) if attempt < len(self._attempts) else 0

    def supervise(self) -> int:
        return supervise(
            Supervision(self.folder / "run", self._recovery, Voice(self.complaints.append, self.messages.append)),
            lambda count, environment, folder: launch_forked(self._work, environment, folder),
            WorldSizePolicy(1, 1, lambda count: True),
        )

    @property
    def earlier_attempts(self) -> list[str]:
        """Description of the earlier attempt that each attempt received."""
        return [path.read_text() for path in sorted(self.folder.glob("left-*"))]

    @property
    def attempts(self) -> int:
        return len(list(self.folder.glob("attempt-*")))

    def events(self, kind: str) -> list[dict]:
        path = self.folder / "run" / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]


def raises(error):
    def work(folder):
        raise error

    return work


def dies(signal_number):
    def work(folder):
        os.kill(os.getpid(), signal_number)
        time.sleep(1e6)

    return work


def hangs(folder):
    enter_phase("backward")
    enter_phase("forward")  # a phase that it has been through before
    (folder / "hangs").write_text(os.environ[HEARTBEAT_FOLDER])
    time.sleep(1e6)
    return 1


def leaves_a_writer(folder):
    """Die while a child process is still writing."""
    if os.fork() == 0:
        time.sleep(0.5)
        (folder / "written").touch()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def falls_back(folder):
    """Report a rollback to an older step because a saved state is damaged."""
    reset_durable_step(20)
    os.kill(os.getpid(), signal.SIGKILL)


def saves_when_asked(folder):
    received = []
    for signal_number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signal_number, lambda signal_number, frame: received.append(signal_number))
    (folder / "ready").touch()
    while not received:
        time.sleep(0.01)
    (folder / "saved").touch()
    return REQUEUE_CODE


DURING = {
    "bug": raises(ZeroDivisionError("loss / tokens")),
    "wrong name": raises(AttributeError("no such attribute")),
    "mistake": raises(DataError("shard 3 is gone")),
    "disk": raises(StorageError("disk full")),
    "killed": dies(signal.SIGKILL),
    "stopped": dies(signal.SIGSTOP),
    "hangs": hangs,
    "writer": leaves_a_writer,
    "falls back": falls_back,
    "lost": raises(StateLostError("the state of step 40 has gone")),
    "saves": saves_when_asked,
}


def prepares(folder):
    (folder / "ready").touch()
    time.sleep(1e6)
    return 1


BEFORE = {
    "early bug": raises(ZeroDivisionError("no such thing")),
    "early disk": raises(StorageError("disk full")),
    "prepares": prepares,
}


def test_an_attempt_gets_the_durable_step_of_earlier_ones(tmp_path):
    """An attempt gets the newest durable step of earlier ones, or the step of a rollback after damage."""
    run = Run(tmp_path, "killed", "early bug", "killed", "falls back", "killed", saved=(40, None, 60, 80, None))
    assert run.supervise() == 0
    # An attempt that ended early reports nothing new. One that trained knows its own steps: 0 if it saved none.
    assert run.earlier_attempts == ["", "40 run-a", "40 run-a", "60 run-a", "20 run-a", "0 run-a"]


@pytest.mark.parametrize("found_id", [None, "run-b"], ids=["an empty folder", "another run's folder"])
def test_nothing_is_written_to_another_runs_folder(tmp_path, found_id):
    run = Run(tmp_path, "killed")
    (tmp_path / "run" / ID_NAME).unlink()
    if found_id is not None:
        (tmp_path / "run" / ID_NAME).write_text(found_id)
    assert run.supervise() == 0 and run.attempts == 2
    assert [path.name for path in (tmp_path / "run").iterdir()] == ([] if found_id is None else [ID_NAME])


def test_a_lost_state_is_not_retried(tmp_path):
    run = Run(tmp_path, "killed", "lost")
    assert run.supervise() == 3 and run.attempts == 2
    assert "the state of step 40 has gone" in run.complaints[-1]


def test_failures_are_restarted_until_the_run_finishes(tmp_path, capfd):
    run = Run(tmp_path, "killed", "bug", "disk")
    assert run.supervise() == 0 and run.attempts == 4
    incidents = run.events("incident")
    assert [(event["kind"], event["cause"], event["phase"], event["restart"]) for event in incidents] == [
        ("signal", "SIGKILL", "forward", True),
        ("exception", "ZeroDivisionError: loss / tokens", "forward", True),
        ("passing", "disk full", "forward", True),
    ]
    assert [event["step"] for event in incidents] == [1, 1, 1]
    assert "Traceback" in incidents[1]["detail"]
    assert len(run.events("restart")) == 3 and len(run.complaints) == 3
    assert "the process of the run was killed by SIGKILL" in run.complaints[0]
    assert capfd.readouterr().err == "", "the supervisor alone prints it"


@pytest.mark.parametrize(("attempt", "code"), [("mistake", 2), ("early bug", 1), ("early disk", 3)], ids=str)
def test_permanent_failures_are_not_restarted(tmp_path, attempt, code):
    run = Run(tmp_path, attempt)
    assert run.supervise() == code and run.attempts == 1 and len(run.complaints) == 1
    assert run.events("restart") == run.events("incident") == []


def test_a_mistake_of_the_program_is_tried_twice(tmp_path):
    run = Run(tmp_path, *["wrong name"] * 3, restarts=3)
    assert run.supervise() == 1 and run.attempts == 2
    traceback, _, decision = run.complaints[-1].rpartition("\n")
    assert "no such attribute" in traceback and "Traceback" in traceback
    assert decision.startswith("given up: AttributeError at ") and "test_supervisor.py:" in decision
    assert decision.endswith(" in step 1 twice; a restart would raise it again")
    assert [event["restart"] for event in run.events("incident")] == [True, False]


def test_a_run_without_progress_is_given_up_with_the_last_cause(tmp_path):
    run = Run(tmp_path, "killed", "killed", "disk", restarts=2)
    assert run.supervise() == 3 and run.attempts == 3
    assert run.complaints[-1] == (
        "error: disk full\ngiven up: 2 restarts in a row brought no new checkpoint (recovery.restarts=2)"
    )
    assert [event["restart"] for event in run.events("incident")] == [True, True, False]


def test_a_run_that_saves_between_failures_continues(tmp_path):
    run = Run(tmp_path, *["killed"] * 5, saved=(5, 6, 7, 8, 9), restarts=1)
    assert run.supervise() == 0 and run.attempts == 6


def test_a_hang_is_recorded_with_its_stack_and_restarted(tmp_path, monkeypatch):
    def is_hung(beat):
        return (tmp_path / "hangs").exists() and beat.pid == int((tmp_path / "attempt-0").read_text())

    monkeypatch.setattr(Watchdog, "check", ahead_in_hangs(is_hung))
    run = Run(tmp_path, "hangs", "stopped", hang_seconds=600.0)
    # The watchdog has learned the duration of a forward pass in the first attempt.
    assert run.supervise() == 0 and run.attempts == 3
    first, second = run.events("hang")
    assert (first["rank"], first["phase"], first["step"]) == (0, "forward", 1)
    assert "in hangs" in first["stack"] and "time.sleep" not in first["stack"]
    assert "in hangs" in Path(first["stacks"]).read_text() and first["seconds"] > 600.0
    assert second["why"] == "stopped by a signal" and "in work" in second["stack"]
    wait_until_gone(int((tmp_path / "attempt-1").read_text()))


def test_the_next_attempt_starts_after_leftover_writers_finish(tmp_path):
    run = Run(tmp_path, "writer")
    assert run.supervise() == 0
    written, second = (tmp_path / "written").stat().st_mtime, (tmp_path / "attempt-1").stat().st_mtime
    assert written <= second


def test_goodput_accounts_for_every_second(tmp_path, monkeypatch):
    accounts = []

    class Recorded(Goodput):
        def __init__(self, now):
            super().__init__(now)
            accounts.append((now, self))

    monkeypatch.setattr(supervisor, "Goodput", Recorded)
    run, before = Run(tmp_path, "killed", "bug", saved=(1, None)), time.monotonic()
    run.supervise()
    after = time.monotonic()
    (final,) = [event["seconds"] for event in run.events("goodput") if event["final"]]
    assert set(final) == set(GOODPUT_PARTS) and all(value >= 0 for value in final.values())
    [(begin, account)] = accounts
    assert before <= begin and account.accounted_until <= after
    assert sum(final.values()) == pytest.approx(account.accounted_until - begin, abs=1e-2)
    assert final["waiting"] >= 0.05 + 0.1, "the backoff before the restarts"
    assert len(run.messages) == 1 and run.messages[0].startswith("time "), "a short run has no share"


@pytest.mark.parametrize(
    "signal_number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda signal_number: signal_number.name
)
def test_a_preempted_run_saves_and_exits_for_requeue(tmp_path, signal_number):
    run = Run(tmp_path, "saves")
    process = _in_background(run)
    wait_for(tmp_path / "ready")
    os.kill(process, signal_number)
    assert _exit_code(process) == REQUEUE_CODE
    assert (tmp_path / "saved").exists() and run.attempts == 1


@pytest.mark.parametrize(
    "signal_number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda signal_number: signal_number.name
)
@pytest.mark.parametrize("who", ["supervisor", "worker"])
def test_preemption_before_training_also_exits_for_requeue(tmp_path, signal_number, who):
    run = Run(tmp_path, "prepares")
    process = _in_background(run)
    wait_for(tmp_path / "ready")
    os.kill(process if who == "supervisor" else int((tmp_path / "attempt-0").read_text()), signal_number)
    assert _exit_code(process) == REQUEUE_CODE and run.attempts == 1


def test_a_run_stopped_during_backoff_is_not_restarted(tmp_path):
    run = Run(tmp_path, "killed", backoff_seconds=1e5)
    process = _in_background(run)
    wait_until(lambda: bool(run.events("goodput")))
    os.kill(process, signal.SIGTERM)
    assert _exit_code(process) == REQUEUE_CODE and run.attempts == 1


def test_ctrl_c_ends_a_worker_without_handlers(tmp_path):
    run = Run(tmp_path, "hangs")
    process = _in_background(run)
    wait_for(tmp_path / "hangs")
    worker = int((tmp_path / "attempt-0").read_text())
    os.kill(process, signal.SIGINT)
    wait_until_gone(worker)
    assert _exit_code(process) == 130


def test_a_worker_does_not_outlive_a_killed_supervisor(tmp_path):
    run = Run(tmp_path, "hangs")
    process = _in_background(run)
    wait_for(tmp_path / "hangs")
    os.kill(process, signal.SIGKILL)
    assert _exit_code(process) == -signal.SIGKILL
    wait_until_gone(int((tmp_path / "attempt-0").read_text()))
    assert not Path((tmp_path / "hangs").read_text()).parent.exists(), "nor do the heartbeats"


def _in_background(run: Run) -> int:
    """Start a supervisor in a forked process; return its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = run.supervise()
        finally:
            os._exit(code)
    return child


def _exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
