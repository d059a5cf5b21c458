"""How the launch tests start processes and wait for what they do."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hlat.config.sections import RecoveryConfig
from hlat.launch import SupervisedRun, launch_multiprocess, supervise
from hlat.resilience import Sizes

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def run_workers(
    command: Sequence[str],
    nproc: int,
    run_dir: Path,
    complain: Callable[[str], None],
    recovery: RecoveryConfig | None = None,
) -> int:
    """Run a command in several processes under a supervisor, which restarts nothing unless told to; its exit code."""
    return supervise(
        SupervisedRun(
            start=lambda count, environment, folder: launch_multiprocess(command, count, environment, folder),
            sizes=Sizes(nproc, nproc, lambda count: True),
            run_dir=run_dir,
            recovery=recovery or RecoveryConfig(restarts=0),
            complain=complain,
            say=print,
        )
    )


def launch(scenario: str, folder: Path, nproc: int = 2) -> tuple[int, str]:
    """Run a scenario of ``worker.py`` in several processes: (exit code, what the user was told)."""
    said: list[str] = []
    command = [sys.executable, str(HERE / "worker.py"), scenario, str(folder)]
    return run_workers(command, nproc, folder / "run", said.append), "\n".join(said)


def start_launcher(scenario: str, folder: Path, nproc: int, environment: dict[str, str]) -> "subprocess.Popen[str]":
    """Start the launcher in a process group of its own, as a shell starts a command."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.launch.launcher", str(nproc), scenario, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, **environment},
    )


def wait_for(*files: Path) -> None:
    """Wait until files exist."""
    wait_until(lambda: all(file.exists() for file in files))


def wait_until_gone(pid: int) -> None:
    """Wait until a process has ended."""
    wait_until(lambda: not _runs(pid))


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait; the bound is there for a test that would otherwise never end."""
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in two minutes"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and ") Z" in stat.read_text())  # ended, and its new parent has not looked yet
