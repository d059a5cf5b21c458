"""Attempt after attempt, with real processes that fail in every way; no torch in any of them, so that all is quick."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from hlat.config.sections import RecoveryConfig
from hlat.launch import SupervisedRun, launch_forked, supervise, worker_context
from hlat.resilience import BEATS, Sizes, count_steps, fell_back, secured, trains_in
from hlat.resilience.goodput import PARTS
from hlat.runtime import DataError, StateLostError, StorageError
from hlat.runtime.process import REQUEUE_CODE, enter_phase
from hlat.runtime.storage import EARLIER_ATTEMPT_ENV, ID_NAME
from tests.support.launch.launching import wait_for, wait_until, wait_until_gone


class Run:
    """A supervised process whose attempts do one thing each; the last one finishes the run."""

    def __init__(self, folder: Path, *attempts, saved=(), **recovery) -> None:
        self.folder, self._attempts, self._saved = folder, attempts, saved
        (folder / "run").mkdir(exist_ok=True)
        (folder / "run" / ID_NAME).write_text("its number")
        self.said: list[str] = []
        self.complaints: list[str] = []
        self._recovery = RecoveryConfig(**{"backoff_seconds": 0.05, **recovery})

    def _work(self) -> int:
        number = len(list(self.folder.glob("attempt-*")))
        (self.folder / f"attempt-{number}").write_text(str(os.getpid()))
        (self.folder / f"left-{number}").write_text(os.environ.get(EARLIER_ATTEMPT_ENV, ""))
        with worker_context():
            trains_in("its number")
            enter_phase("start")
            if number < len(self._attempts) and self._attempts[number] in BEFORE:
                return BEFORE[self._attempts[number]](self.folder)
            count_steps(lambda: 0)
            enter_phase("data")
            enter_phase("forward")
            if number < len(self._saved) and self._saved[number] is not None:
                secured(self._saved[number])
            time.sleep(0.01)
            return DURING[self._attempts[number]](self.folder) if number < len(self._attempts) else 0

    def supervise(self) -> int:
        return supervise(
            SupervisedRun(
                start=lambda count, environment, folder: launch_forked(self._work, environment, folder),
                sizes=Sizes(1, 1, lambda count: True),
                run_dir=self.folder / "run",
                recovery=self._recovery,
                complain=self.complaints.append,
                say=self.said.append,
            )
        )

    @property
    def left(self) -> list[str]:
        """What each attempt was told that the one before had left."""
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


def dies(number):
    def work(folder):
        os.kill(os.getpid(), number)
        time.sleep(60)

    return work


def hangs(folder):
    enter_phase("backward")
    enter_phase("forward")  # it has been through this before
    (folder / "hangs").write_text(os.environ[BEATS])
    time.sleep(60)
    return 1


def leaves_a_writer(folder):
    """Dies while a process beside it still writes."""
    if os.fork() == 0:
        time.sleep(0.5)
        (folder / "written").touch()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def falls_back(folder):
    """A rollback finds that what it had saved is damaged."""
    fell_back(20)
    os.kill(os.getpid(), signal.SIGKILL)


def saves_when_asked(folder):
    asked = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: asked.append(number))
    (folder / "ready").touch()
    while not asked:
        time.sleep(0.01)
    (folder / "saved").touch()
    return REQUEUE_CODE


DURING = {
    "bug": raises(ZeroDivisionError("loss / tokens")),
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
    time.sleep(60)
    return 1


BEFORE = {
    "early bug": raises(ZeroDivisionError("no such thing")),
    "early disk": raises(StorageError("disk full")),
    "prepares": prepares,
}


def test_an_attempt_is_told_what_the_one_before_left(tmp_path):
    """The newest step that it knew to be durable, or what it fell back to when that was found damaged."""
    run = Run(tmp_path, "killed", "early bug", "killed", "falls back", "killed", saved=(40, None, 60, 80, None))
    assert run.supervise() == 0
    # An early end says nothing new; an attempt that began had found what it had to, here with nothing saved since: 0.
    assert run.left == ["", "40 its number", "40 its number", "60 its number", "20 its number", "0 its number"]


@pytest.mark.parametrize("there", [None, "another number"], ids=["an empty folder", "another run's folder"])
def test_nothing_is_told_to_a_folder_that_is_not_the_run_s(tmp_path, there):
    run = Run(tmp_path, "killed")
    (tmp_path / "run" / ID_NAME).unlink()
    if there is not None:
        (tmp_path / "run" / ID_NAME).write_text(there)
    assert run.supervise() == 0 and run.attempts == 2
    assert [path.name for path in (tmp_path / "run").iterdir()] == ([] if there is None else [ID_NAME])


def test_what_is_lost_is_not_looked_for_again(tmp_path):
    run = Run(tmp_path, "killed", "lost")
    assert run.supervise() == 3 and run.attempts == 2
    assert "the state of step 40 has gone" in run.complaints[-1]


def test_faults_are_restarted_until_the_run_finishes(tmp_path, capfd):
    run = Run(tmp_path, "killed", "bug", "disk")
    assert run.supervise() == 0 and run.attempts == 4
    incidents = run.events("incident")
    assert [(one["kind"], one["cause"], one["phase"], one["restart"]) for one in incidents] == [
        ("signal", "SIGKILL", "forward", True),
        ("exception", "ZeroDivisionError: loss / tokens", "forward", True),
        ("passing", "disk full", "forward", True),
    ]
    assert [one["step"] for one in incidents] == [1, 1, 1]
    assert "Traceback" in incidents[1]["detail"]
    assert len(run.events("restart")) == 3 and len(run.complaints) == 3
    assert "the process of the run was killed by SIGKILL" in run.complaints[0]
    assert capfd.readouterr().err == "", "said once, by the supervisor"


@pytest.mark.parametrize(("attempt", "code"), [("mistake", 2), ("early bug", 1), ("early disk", 3)], ids=str)
def test_what_would_fail_again_is_not_tried_again(tmp_path, attempt, code):
    run = Run(tmp_path, attempt)
    assert run.supervise() == code and run.attempts == 1 and len(run.complaints) == 1
    assert run.events("restart") == run.events("incident") == []


def test_a_run_that_gets_nowhere_is_given_up_with_the_last_cause(tmp_path):
    run = Run(tmp_path, "killed", "killed", "disk", restarts=2)
    assert run.supervise() == 3 and run.attempts == 3
    assert run.complaints[-1] == (
        "error: disk full\ngiven up: 2 restarts in a row brought no new checkpoint (recovery.restarts=2)"
    )
    assert [one["restart"] for one in run.events("incident")] == [True, True, False]


def test_a_run_that_saves_in_between_goes_on(tmp_path):
    run = Run(tmp_path, *["killed"] * 5, saved=(5, 6, 7, 8, 9), restarts=1)
    assert run.supervise() == 0 and run.attempts == 6


def test_a_hang_is_named_with_its_stack_and_restarted(tmp_path):
    run = Run(tmp_path, "hangs", "stopped", hang_seconds=0.5)
    # The second attempt knows from the first how long a forward pass takes.
    assert run.supervise() == 0 and run.attempts == 3
    first, second = run.events("hang")
    assert (first["rank"], first["phase"], first["step"]) == (0, "forward", 1)
    assert "in hangs" in first["stack"] and "time.sleep" not in first["stack"]
    assert "in hangs" in Path(first["stacks"]).read_text() and first["seconds"] > 0.5
    assert second["why"] == "stopped by a signal" and "in work" in second["stack"]
    wait_until_gone(int((tmp_path / "attempt-1").read_text()))


def test_what_a_dead_process_was_writing_may_be_finished_before_the_next_attempt(tmp_path):
    run = Run(tmp_path, "writer")
    assert run.supervise() == 0
    written, second = (tmp_path / "written").stat().st_mtime, (tmp_path / "attempt-1").stat().st_mtime
    assert written <= second


def test_every_second_is_accounted_for(tmp_path):
    run, before = Run(tmp_path, "killed", "bug", saved=(1, None)), time.monotonic()
    run.supervise()
    whole = time.monotonic() - before
    (final,) = [one["seconds"] for one in run.events("goodput") if one["final"]]
    assert set(final) == set(PARTS) and all(value >= 0 for value in final.values())
    assert whole - 0.5 < sum(final.values()) <= whole, "less what it takes to make and remove a folder"
    assert final["waiting"] >= 0.05 + 0.1, "the pauses before the restarts"
    assert len(run.said) == 1 and run.said[0].startswith("goodput ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_preempted_run_saves_and_is_to_be_queued_again(tmp_path, number):
    run = Run(tmp_path, "saves")
    supervisor = _in_background(run)
    wait_for(tmp_path / "ready")
    os.kill(supervisor, number)
    assert _exit_code(supervisor) == REQUEUE_CODE
    assert (tmp_path / "saved").exists() and run.attempts == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
@pytest.mark.parametrize("who", ["supervisor", "worker"])
def test_preempted_before_there_is_anything_to_save_it_is_queued_again_too(tmp_path, number, who):
    run = Run(tmp_path, "prepares")
    supervisor = _in_background(run)
    wait_for(tmp_path / "ready")
    os.kill(supervisor if who == "supervisor" else int((tmp_path / "attempt-0").read_text()), number)
    assert _exit_code(supervisor) == REQUEUE_CODE and run.attempts == 1


def test_a_run_that_is_stopped_during_a_pause_is_not_started_again(tmp_path):
    run = Run(tmp_path, "killed", backoff_seconds=60.0)
    supervisor = _in_background(run)
    wait_until(lambda: bool(run.events("goodput")))
    os.kill(supervisor, signal.SIGTERM)
    assert _exit_code(supervisor) == REQUEUE_CODE and run.attempts == 1


def test_ctrl_c_ends_what_has_not_begun_to_listen(tmp_path):
    run = Run(tmp_path, "hangs")
    supervisor = _in_background(run)
    wait_for(tmp_path / "hangs")
    worker = int((tmp_path / "attempt-0").read_text())
    os.kill(supervisor, signal.SIGINT)
    wait_until_gone(worker)
    assert _exit_code(supervisor) == 130


def test_a_process_whose_supervisor_is_killed_does_not_outlive_it(tmp_path):
    run = Run(tmp_path, "hangs")
    supervisor = _in_background(run)
    wait_for(tmp_path / "hangs")
    os.kill(supervisor, signal.SIGKILL)
    assert _exit_code(supervisor) == -signal.SIGKILL
    wait_until_gone(int((tmp_path / "attempt-0").read_text()))
    assert not Path((tmp_path / "hangs").read_text()).parent.exists(), "nor do the heartbeats"


def _in_background(run: Run) -> int:
    """The process id of a supervisor of its own."""
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
