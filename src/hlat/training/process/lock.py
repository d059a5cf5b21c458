"""One run directory, one process: two writers would interleave metrics and delete each other's checkpoints."""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

from hlat.runtime import LaunchError, StorageError
from hlat.runtime.process import LAUNCHER_ENV, is_running
from hlat.runtime.storage import LOCK_NAME

_PATIENCE = 900.0  # seconds
_LOOK_EVERY = 0.1


def _quietly(text: str) -> None:
    """Wait without a word."""


@contextmanager
def run_lock(run_dir: Path, say: Callable[[str], None] = _quietly, patience: float = _PATIENCE) -> Iterator[int]:
    """Hold the run directory. The lock ends with the process, however it ends.

    A process that is about to end is waited for: one whose supervisor has been killed saves and stops, and one that has
    been killed itself may have left a process that finishes writing a checkpoint.

    Args:
        run_dir: the folder, which exists.
        say: told, once, that another process is waited for.
        patience: seconds that it is waited for.

    Yields:
        A descriptor that holds the lock: whoever it is given to holds it too, as long as it has it open.

    Raises:
        LaunchError: another process holds it.
        StorageError: it cannot be written.
    """
    try:
        file = (run_dir / LOCK_NAME).open("a+")
    except OSError as error:
        raise StorageError(f"run.dir {run_dir}: cannot be written: {error.strerror}. Give another run.dir.") from error
    with file:
        if not _taken(file):
            _wait(file, run_dir, say, patience)
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}, launcher {os.environ.get(LAUNCHER_ENV, 'none')}")
        file.flush()
        yield file.fileno()


def _taken(file: TextIOWrapper) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(file: TextIOWrapper, run_dir: Path, say: Callable[[str], None], patience: float) -> None:
    deadline, said = time.monotonic() + patience, False
    while not _taken(file):
        file.seek(0)
        holder = file.read().strip()
        if not _is_ending(holder) or time.monotonic() > deadline:
            message = f"run.dir {run_dir}: another process ({holder}) is training in it."
            raise LaunchError(f"{message} Wait for it, or give another run.name or run.dir.")
        if not said:
            say(f"run.dir {run_dir}: waiting for what is left of the run before ({holder}) to save and end")
            said = True
        time.sleep(_LOOK_EVERY)


def _is_ending(holder: str) -> bool:
    """Whether a process of this machine that holds the lock, or the supervisor that it belonged to, has gone."""
    if not holder:  # it is just about to say who it is
        return True
    words = holder.replace(",", "").split()
    if len(words) != 6 or words[0::2] != ["pid", "on", "launcher"] or words[3] != socket.gethostname():
        return False
    return any(number.isdigit() and not is_running(int(number)) for number in (words[1], words[5]))
