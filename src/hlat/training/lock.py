"""One run directory, one process: two writers would interleave metrics and delete each other's checkpoints."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hlat.config import LaunchError, StorageError


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run directory, creating it if need be. The lock ends with the process, however it ends.

    Raises:
        LaunchError: another process holds it.
        StorageError: the folder cannot be created or written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = (run_dir / ".lock").open("a+")
    except OSError as error:
        raise StorageError(f"run.dir {run_dir}: cannot be written: {error.strerror}. Give another run.dir.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            message = f"run.dir {run_dir}: another process ({holder}) is training in it."
            raise LaunchError(f"{message} Wait for it, or give another run.name or run.dir.") from None
        file.truncate(0)
        file.write(f"pid {os.getpid()}")
        file.flush()
        yield
