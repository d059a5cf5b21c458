"""Lock of the run directory: two writers would interleave metrics and delete each other's checkpoints."""

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
_POLL_EVERY = 0.1  # seconds


def _ignore(text: str) -> None:
    """Show nothing."""


@contextmanager
def run_lock(run_dir: Path, say: Callable[[str], None] = _ignore, patience: float = _PATIENCE) -> Iterator[int]:
    """Hold the lock of the run directory. The system releases it when the process ends, however it ends.

    If the present holder is about to end, wait for it: a process whose supervisor was killed saves and stops, and a
    process that was killed may have left a saver that finishes writing a checkpoint.

    Args:
        run_dir: an existing folder.
        say: called once with a message if another process is waited for.
        patience: seconds to wait at most.

    Yields:
        A file descriptor that holds the lock; a process that inherits it holds the lock until it closes it.

    Raises:
        LaunchError: another process holds the lock.
        StorageError: the lock file cannot be written.
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
    deadline, reported = time.monotonic() + patience, False
    while not _taken(file):
        file.seek(0)
        holder = file.read().strip()
        if not _is_ending(holder) or time.monotonic() > deadline:
            message = f"run.dir {run_dir}: another process ({holder}) is training in it."
            raise LaunchError(f"{message} Wait for it, or give another run.name or run.dir.")
        if not reported:
            say(f"run.dir {run_dir}: waiting for the previous run ({holder}) to save and end")
            reported = True
        time.sleep(_POLL_EVERY)


def _is_ending(holder: str) -> bool:
    """Return True if the holder, a process of this machine, or its supervisor no longer runs."""
    if not holder:  # it has the lock and is about to write its process id
        return True
    words = holder.replace(",", "").split()
    if len(words) != 6 or words[0::2] != ["pid", "on", "launcher"] or words[3] != socket.gethostname():
        return False
    return any(number.isdigit() and not is_running(int(number)) for number in (words[1], words[5]))
