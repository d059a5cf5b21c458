"""The folder of prepared data: that it can be one, and that only one process works in it at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hlat.data.storage import storing
from hlat.runtime import DataError


def checked_folder(out_dir: str | Path) -> Path:
    """The folder, which need not exist yet.

    Raises:
        DataError: a file is in the way.
    """
    folder = Path(out_dir).expanduser()
    with storing(folder):
        there = next((place for place in (folder, *folder.parents) if place.exists()), None)
    if there is not None and not there.is_dir():
        raise DataError(f"data.prepared_dir {folder}: {there} is a file, so no data can be put there. Name a folder.")
    return folder


@contextmanager
def locked(folder: Path, wait: bool) -> Iterator[None]:
    """Only one preparation at a time works in a folder; the lock goes with the process, however it ends."""
    with ExitStack() as stack:
        descriptor = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise DataError(f"{folder}: another process is preparing data here. Wait for it to end.") from error
        yield
