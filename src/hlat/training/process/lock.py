"""Lock of the run directory: two writers would interleave metrics and delete each other's checkpoints."""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

from hlat.runtime.errors import LaunchError, StorageError
from hlat.runtime.process.process_status import LAUNCHER_ENV, is_running
from hlat.runtime.storage.run_folder import ATTEMPT_ENV, LOCK_NAME

_PATIENCE = 900.0  # seconds
_OTHER_HOST = 120.0  # seconds: file servers release the lock of a host that is gone within 90
_EARLIER_ATTEMPT = 15.0  # seconds for the process of an earlier attempt to end
_POLL_EVERY = 0.1  # seconds


def _ignore(text: str) -> None:
    """Show nothing."""


@contextmanager
def run_lock(run_dir: Path, say: Callable[[str], None] = _ignore, patience: float = _PATIENCE) -> Iterator[int]:
    """Hold the lock of the run directory. The system releases it when the process ends, however it ends.

    If the present holder is about to end, wait for it: a process whose supervisor was killed saves and stops, and a
    process that was killed may have left a saver that finishes writing a checkpoint. A holder on another host is waited
    for a shorter time, because it cannot be looked at. The holder may also belong to an earlier attempt of this launch
    on several hosts, and never end because its host is stopped: then the lock file is replaced. Whoever holds the old
    one is found out before it writes (``RunFolder.check``).

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
    file = _open(run_dir)
    try:
        if not _taken(file) and not _wait(file, run_dir, say, patience):
            file.close()
            file = _replace(run_dir)
        file.truncate(0)
        launcher, attempt = os.environ.get(LAUNCHER_ENV, "none"), os.environ.get(ATTEMPT_ENV, "none")
        file.write(f"pid {os.getpid()} on {socket.gethostname()}, launcher {launcher}, attempt {attempt}")
        file.flush()
        yield file.fileno()
    finally:
        file.close()


def _open(run_dir: Path) -> TextIOWrapper:
    try:
        return (run_dir / LOCK_NAME).open("a+")
    except OSError as error:
        raise StorageError(f"run.dir {run_dir}: cannot be written: {error.strerror}. Give another run.dir.") from error


def _replace(run_dir: Path) -> TextIOWrapper:
    """Put a new lock file, which this process holds, in the place of the present one."""
    path = run_dir / f"{LOCK_NAME}.{os.getpid()}"
    file = path.open("a+")
    fcntl.flock(file, fcntl.LOCK_EX)
    path.replace(run_dir / LOCK_NAME)
    return file


def _taken(file: TextIOWrapper) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(file: TextIOWrapper, run_dir: Path, say: Callable[[str], None], patience: float) -> bool:
    """Wait for the lock; return False if it has to be replaced, because its holder is of an earlier attempt."""
    begin, reported = time.monotonic(), False
    while not _taken(file):
        file.seek(0)
        holder = file.read().strip()
        waited = time.monotonic() - begin
        if _is_of_earlier_attempt(holder):
            if waited > _EARLIER_ATTEMPT:
                return False
        elif waited > min(patience, _patience(holder, patience)):
            message = f"run.dir {run_dir}: another process ({holder}) is training in it."
            raise LaunchError(f"{message} Wait for it, or give another run.name or run.dir.")
        if not reported:
            say(f"run.dir {run_dir}: waiting for the previous run ({holder}) to save and end")
            reported = True
        time.sleep(_POLL_EVERY)
    return True


def _patience(holder: str, longest: float) -> float:
    """Seconds to wait for a holder."""
    if not holder:  # it has the lock and is about to write its process id
        return longest
    fields = _fields(holder)
    if fields.get("on") != socket.gethostname():
        return _OTHER_HOST if fields else 0.0
    numbers = (fields.get("pid", ""), fields.get("launcher", ""))
    is_ending = any(number.isdigit() and not is_running(int(number)) for number in numbers)
    return longest if is_ending else 0.0


def _is_of_earlier_attempt(holder: str) -> bool:
    """Return True if the holder belongs to an earlier attempt of the launch that this process belongs to."""
    launch, _, number = os.environ.get(ATTEMPT_ENV, "").partition("/")
    its_launch, _, its_number = _fields(holder).get("attempt", "").partition("/")
    return bool(launch) and launch == its_launch and its_number.isdigit() and int(its_number) < int(number)


def _fields(holder: str) -> dict[str, str]:
    """Fields of the text of a lock file; none if it is not such a text."""
    words = holder.replace(",", "").split()
    return dict(zip(words[::2], words[1::2], strict=True)) if len(words) % 2 == 0 and words[:1] == ["pid"] else {}
