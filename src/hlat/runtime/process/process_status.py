"""Other processes of this machine: whether they run, are stopped, or belong to a session.

/proc/<pid>/stat --> state, parent, group, session; where there is no /proc, what signals tell
"""

import os
from pathlib import Path

LAUNCHER_ENV = "HLAT_LAUNCHER_PID"
"""The environment variable that holds the process id of whoever started this process of a run."""

_PROC = Path("/proc")


def is_running(pid: int) -> bool:
    """Whether there is a process of this id that has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _stat(pid)[:1] != ["Z"]  # ended, and its parent has not looked yet


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal (SIGSTOP), as far as the system says so."""
    return _stat(pid)[:1] in (["T"], ["t"])


def session_is_alive(leaders: set[int]) -> bool:
    """Whether a process of one of these sessions runs; False where the system does not say."""
    if not _PROC.is_dir():
        return False
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            stat = _stat(int(entry.name))
            if len(stat) > 3 and stat[0] not in "ZX" and int(stat[3]) in leaders:
                return True
    return False


def _stat(pid: int) -> list[str]:
    """The fields of a process from its state on; empty where there is none."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
