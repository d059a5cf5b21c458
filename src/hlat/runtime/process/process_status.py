"""Status of other processes on this machine: running, stopped, session.

/proc/<pid>/stat --> state, parent, group, session. Without /proc, only signals are available.
"""

import os
from pathlib import Path

LAUNCHER_ENV = "HLAT_LAUNCHER_PID"
"""Environment variable with the process id of the launcher that started this process."""

_PROC = Path("/proc")


def is_running(pid: int) -> bool:
    """Return True if a process with this id exists and has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _stat(pid)[:1] != ["Z"]  # a zombie: it has ended, and its parent has not waited for it


def is_stopped(pid: int) -> bool:
    """Return True if a process was stopped by a signal (SIGSTOP); False if the system does not report it."""
    return process_state(pid) in ("T", "t")


def process_state(pid: int) -> str:
    """Return the state of a process as Linux names it, such as R, S, D or T; empty if the system does not report it."""
    return next(iter(_stat(pid)), "")


def session_is_alive(leaders: set[int]) -> bool:
    """Return True if a process of one of these sessions is running; False if the system does not report sessions."""
    if not _PROC.is_dir():
        return False
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            stat = _stat(int(entry.name))
            if len(stat) > 3 and stat[0] not in "ZX" and int(stat[3]) in leaders:
                return True
    return False


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; empty if there is no such process."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
