"""The folder of a run disappears during training: the run ends with a message, and no new run is begun in its place."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.commands import StartedCommand

_TIMEOUT = 1200.0  # seconds until a wait fails


def wait_until(holds: Callable[[], bool], process: "StartedCommand | subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + _TIMEOUT
    while not holds():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.02)


def arguments(recipe: Path, tiny: list[str], run: Path, data: Path, *more: str) -> list[str]:
    """Arguments of a run that would take hours, and saves often."""
    given = [argument for argument in tiny if not argument.startswith("run.dir=")]
    own = [f"run.dir={run}", f"data.prepared_dir={data}", "training.steps=1000000", "checkpoint.every_steps=20"]
    quiet = ["evaluation.every_steps=null", "tracking.console=plain", "recovery.backoff_seconds=0.05"]
    return ["train", str(recipe), *given, *own, *quiet, *more]


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("checkpoints/step-*"))


def end(process: "StartedCommand | subprocess.Popen[str]") -> None:
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
    process.wait()


def output_of(process: "StartedCommand | subprocess.Popen[str]") -> str:
    return process.communicate(timeout=_TIMEOUT)[0]


TWO = ["--nproc", "2"]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param([], id="one process"),
        pytest.param(["checkpoint.background=false"], id="no saver", marks=pytest.mark.slow),
        pytest.param(TWO, id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_folder_is_removed_ends_without_creating_it(recipe_file, tiny, tmp_path, change):
    run = tmp_path / "run"
    process = StartedCommand(*arguments(recipe_file, tiny, run, tmp_path / "data", *change))
    try:
        wait_until(lambda: len(saved(run)) > 0, process)
        away = tmp_path / "away"
        run.rename(away)  # atomic, while removal would race with writes
        shutil.rmtree(away, ignore_errors=True)
        output = output_of(process)
    finally:
        end(process)
    assert process.returncode == 3, output
    assert f"run.dir {run}: the folder of this run is gone: removed, renamed or unmounted" in output
    assert "Traceback" not in output and "restart" not in output
    assert not run.exists()


def mounted(folder: Path, command: list[str]) -> "subprocess.Popen[str]":
    """Run a command in its own mount namespace, with a file system on a folder that disappears with the command."""
    script = f'mount -t tmpfs none "{folder}" && exec "$@"'
    return subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def mounts() -> Iterator[None]:
    """Skip the test if file systems cannot be mounted."""
    attempt = (
        subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "none", "/mnt"],
            capture_output=True,
            text=True,
            check=False,
        )
        if shutil.which("unshare") and shutil.which("nsenter")
        else None
    )
    if attempt is None or attempt.returncode != 0:
        pytest.skip("this user may not mount a file system in its own namespace")
    yield


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize(
    ("change", "killed", "inside"),
    [
        pytest.param([], True, "", id="one process, killed"),
        pytest.param(TWO, False, "", id="two ranks"),
        pytest.param([], False, "run", id="one process in a subfolder", marks=pytest.mark.slow),
        pytest.param([], False, "", id="one process", marks=pytest.mark.slow),
        pytest.param(TWO, True, "", id="two ranks, one killed", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_written_into_the_mount_point_of_an_unmounted_run(
    recipe_file, tiny, tmp_path, change, killed, inside
):
    """If a rank is killed, the supervisor's next attempt finds the empty folder."""
    point = tmp_path / "disk"
    point.mkdir()
    run = point / inside
    every = ["checkpoint.every_steps=20" if not killed else "checkpoint.every_steps=40"]
    command = [sys.executable, "-m", "hlat", *arguments(recipe_file, tiny, run, tmp_path / "data", *change, *every)]
    process = mounted(point, command)
    try:
        view = Path(f"/proc/{process.pid}/root{run}")  # as seen by the command
        wait_until(lambda: len(saved(view)) > 0, process)
        # The run is suspended, so that it sees the unmount and the kill at the same time.
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            member.suspend()
        subprocess.run(["nsenter", "--target", str(process.pid), "--mount", "umount", "--lazy", str(point)], check=True)
        if killed:
            supervisor = psutil.Process(process.pid)
            min(supervisor.children(), key=lambda child: child.pid).send_signal(signal.SIGKILL)
        for member in family:
            if member.is_running():
                os.kill(member.pid, signal.SIGCONT)
        output = output_of(process)
    finally:
        end(process)
    assert process.returncode == 3, output
    assert f"run.dir {run}: the folder of this run is gone" in output
    assert "Traceback" not in output
    assert output.count("restart") == (1 if killed else 0), "what cannot succeed is not tried again"
    assert output.count("resumed") == 0 and output.count(" parameters, ") == 1, "no other run was begun"
    assert not any(point.iterdir()), sorted(point.rglob("*"))
