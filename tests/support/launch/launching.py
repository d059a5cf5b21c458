"""Functions of the launch tests to start processes and wait for their effects."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hlat.config.sections.operation import RecoveryConfig
from hlat.launch import Supervision, Voice, launch_multiprocess, supervise
from hlat.resilience import WorldSizePolicy

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def run_workers(
    command: Sequence[str],
    nproc: int,
    run_dir: Path,
    complain: Callable[[str], None],
    recovery: RecoveryConfig | None = None,
) -> int:
    """Run a command in several processes under a supervisor, by default without restarts; return its exit code."""
    return supervise(
        Supervision(run_dir, recovery or RecoveryConfig(restarts=0), Voice(complain, print)),
        lambda count, environment, folder: launch_multiprocess(command, count, environment, folder),
        WorldSizePolicy(nproc, nproc, lambda count: True),
    )


def launch(scenario: str, folder: Path, nproc: int = 2) -> tuple[int, str]:
    """Run a scenario of ``worker.py`` in several processes; return the exit code and the messages to the user."""
    messages: list[str] = []
    command = [sys.executable, str(HERE / "worker.py"), scenario, str(folder)]
    return run_workers(command, nproc, folder / "run", messages.append), "\n".join(messages)


def start_launcher(scenario: str, folder: Path, nproc: int, environment: dict[str, str]) -> "subprocess.Popen[str]":
    """Start the launcher in its own process group, as a shell starts a command."""
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
    wait_until(lambda: not _is_running(pid))


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail after ten minutes."""
    deadline = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < deadline, "the condition did not hold within ten minutes"
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and ") Z" in stat.read_text())  # a zombie
