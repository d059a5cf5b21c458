"""Lock of the run directory: a process that is about to end is waited for, with a message, a running one is not."""

import io
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from hlat.config.load import parse_recipe
from hlat.runtime.errors import LaunchError, StorageError
from hlat.runtime.process import LAUNCHER_ENV
from hlat.runtime.storage.run_folder import ATTEMPT_ENV, RunFolder
from hlat.training import loop
from hlat.training import start as lock
from hlat.training.start import run_lock


def hold(folder: Path, launcher: int | None = None, dies: bool = False) -> int:
    """Start a process that holds the lock until the file ``go`` is there, or whose child does if it dies."""
    (folder / "run").mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        if launcher is not None:
            os.environ[LAUNCHER_ENV] = str(launcher)
        with run_lock(folder / "run"):
            if not dies or os.fork() == 0:  # inherits the lock, like a saver process
                (folder / "held").touch()
                while not (folder / "go").exists():
                    time.sleep(0.01)
            os._exit(0)
    while not (folder / "held").exists():
        time.sleep(0.01)
    if dies:
        os.waitpid(child, 0)
    return child


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def gone() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize("dies", [True, False], ids=["it is gone", "its launcher is gone"])
def test_a_previous_run_that_is_ending_is_waited_for_with_one_message(tmp_path, dies):
    holder = hold(tmp_path, None if dies else gone(), dies)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        (tmp_path / "go").touch()

    with run_lock(tmp_path / "run", say):
        assert len(said) == 1 and f"pid {holder} on" in said[0]
        assert f"pid {os.getpid()} on" in (tmp_path / "run" / ".lock").read_text()
    if not dies:
        os.waitpid(holder, 0)


@pytest.mark.parametrize("launcher", [None, os.getpid()], ids=["alone", "with a launcher"])
def test_a_running_process_is_not_waited_for(tmp_path, launcher):
    holder = hold(tmp_path, launcher)
    try:
        with pytest.raises(LaunchError, match=rf"another process \(pid {holder} on .*\) is training"):
            run_lock(tmp_path / "run", pytest.fail).__enter__()
    finally:
        end(holder)


def test_the_wait_for_the_lock_is_limited(tmp_path):
    holder = hold(tmp_path, gone())
    try:
        with pytest.raises(LaunchError, match="is training in it"):
            run_lock(tmp_path / "run", print, patience=0.3).__enter__()
    finally:
        end(holder)


def test_the_lock_of_an_earlier_attempt_whose_host_is_stopped_is_replaced_and_its_holder_finds_out(
    tmp_path, monkeypatch
):
    """A host that was stopped may go on later, and must not write then."""
    monkeypatch.setattr(lock, "_EARLIER_ATTEMPT", 0.3)
    monkeypatch.setenv(ATTEMPT_ENV, "launch/4")
    with run_lock(tmp_path) as earlier:
        folder = RunFolder(tmp_path, earlier)
        folder.check()
        monkeypatch.setenv(ATTEMPT_ENV, "launch/5")
        with run_lock(tmp_path) as now:
            RunFolder(tmp_path, now).check()
            with pytest.raises(StorageError):
                folder.check()
            monkeypatch.setenv(ATTEMPT_ENV, "launch/4")
            with pytest.raises(LaunchError, match="is training in it"):
                run_lock(tmp_path).__enter__()


def test_the_lock_of_another_launch_is_never_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_EARLIER_ATTEMPT", 0.1)
    monkeypatch.setenv(ATTEMPT_ENV, "launch/4")
    with run_lock(tmp_path):
        for other in ("other/5", "", "launch/4"):
            monkeypatch.setenv(ATTEMPT_ENV, other)
            with pytest.raises(LaunchError, match="is training in it"):
                run_lock(tmp_path).__enter__()


def test_a_holder_on_another_host_is_waited_for_because_a_file_server_releases_its_lock_later(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_OTHER_HOST", 0.5)
    with run_lock(tmp_path):
        (tmp_path / ".lock").write_text("pid 1 on elsewhere, launcher 2, attempt none")
        begin = time.monotonic()
        with pytest.raises(LaunchError, match="on elsewhere"):
            run_lock(tmp_path).__enter__()
        assert time.monotonic() - begin >= 0.5


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["standard output", "a stream"])
def test_the_message_goes_to_the_console(
    tiny_recipe: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stream: io.StringIO | None,
) -> None:
    @contextmanager
    def waits(run_dir: Path, say: Callable[[str], None]) -> Iterator[int]:
        say(f"{run_dir}: waiting")
        yield 3

    monkeypatch.setattr(loop, "run_lock", waits)
    content = yaml.safe_load(tiny_recipe)
    content["run"]["dir"] = content["data"]["path"] = str(tmp_path)
    recipe = parse_recipe(content)
    with ExitStack() as stack:
        assert loop._take_lock(stack, recipe, stream) == 3
    printed = capsys.readouterr().out if stream is None else stream.getvalue()
    assert printed == f"{tmp_path}: waiting\n"
