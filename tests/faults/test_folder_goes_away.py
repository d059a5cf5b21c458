"""The folder of a run goes away while it trains: the run ends with a message, and no new run is begun in its place."""

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

_TIMEOUT = 120.0  # for a test that would otherwise never end


def wait_until(happened: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + _TIMEOUT
    while not happened():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def words(recipe: Path, tiny: list[str], run: Path, data: Path, *more: str) -> list[str]:
    """A run that would go on for hours, and saves all the time."""
    given = [argument for argument in tiny if not argument.startswith("run.dir=")]
    own = [f"run.dir={run}", f"data.prepared_dir={data}", "training.steps=1000000", "checkpoint.every_steps=20"]
    quiet = ["evaluation.every_steps=null", "tracking.console=plain", "recovery.backoff_seconds=0.05"]
    return [sys.executable, "-m", "hlat", "train", str(recipe), *given, *own, *quiet, *more]


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("checkpoints/step-*"))


def end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
    process.wait()


def said(process: "subprocess.Popen[str]") -> str:
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
def test_a_run_whose_folder_is_removed_ends_and_makes_no_other(recipe_file, tiny, tmp_path, change):
    run = tmp_path / "run"
    process = subprocess.Popen(
        words(recipe_file, tiny, run, tmp_path / "data", *change),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: len(saved(run)) > 0, process)
        away = tmp_path / "away"
        run.rename(away)  # at one instant, where removing would race with what is being written
        shutil.rmtree(away, ignore_errors=True)
        told = said(process)
    finally:
        end(process)
    assert process.returncode == 3, told
    assert f"run.dir {run}: the folder of this run is gone: removed, renamed or unmounted" in told
    assert "Traceback" not in told and "restart" not in told
    assert not run.exists()


def mounted(folder: Path, command: list[str]) -> "subprocess.Popen[str]":
    """A command that sees a file system of its own on a folder, which ends with it."""
    script = f'mount -t tmpfs none "{folder}" && exec "$@"'
    return subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def mounts() -> Iterator[None]:
    """Skips where file systems cannot be mounted."""
    tried = (
        subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "none", "/mnt"],
            capture_output=True,
            text=True,
            check=False,
        )
        if shutil.which("unshare") and shutil.which("nsenter")
        else None
    )
    if tried is None or tried.returncode != 0:
        pytest.skip("this user may not mount a file system in a namespace of its own")
    yield


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize(
    ("change", "killed", "inside"),
    [
        pytest.param([], True, "", id="one process, which is killed"),
        pytest.param(TWO, False, "", id="two ranks"),
        pytest.param([], False, "run", id="one process in a folder below", marks=pytest.mark.slow),
        pytest.param([], False, "", id="one process", marks=pytest.mark.slow),
        pytest.param(TWO, True, "", id="two ranks of which one is killed", marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_file_system_is_unmounted_writes_nothing_into_the_mount_point(
    recipe_file, tiny, tmp_path, change, killed, inside
):
    """With a rank killed, the supervisor's next attempt is what meets the empty folder."""
    point = tmp_path / "disk"
    point.mkdir()
    run = point / inside
    every = ["checkpoint.every_steps=20" if not killed else "checkpoint.every_steps=40"]
    process = mounted(point, words(recipe_file, tiny, run, tmp_path / "data", *change, *every))
    try:
        view = Path(f"/proc/{process.pid}/root{run}")  # as the command sees it
        wait_until(lambda: len(saved(view)) > 0, process)
        # Both at one instant for the run: stopped, it notices neither before the other.
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for one in family:
            one.suspend()
        subprocess.run(["nsenter", "--target", str(process.pid), "--mount", "umount", "--lazy", str(point)], check=True)
        if killed:
            supervisor = psutil.Process(process.pid)
            min(supervisor.children(), key=lambda child: child.pid).send_signal(signal.SIGKILL)
        for one in family:
            if one.is_running():
                os.kill(one.pid, signal.SIGCONT)
        told = said(process)
    finally:
        end(process)
    assert process.returncode == 3, told
    assert f"run.dir {run}: the folder of this run is gone" in told
    assert "Traceback" not in told
    assert told.count("restart") == (1 if killed else 0), "what cannot succeed is not tried again"
    assert told.count("resumed") == 0 and "plan:" in told and told.count("plan:") == 1, "no other run was begun"
    assert not any(point.iterdir()), sorted(point.rglob("*"))
