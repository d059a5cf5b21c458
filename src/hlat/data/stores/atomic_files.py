"""Files reach the disk whole or not at all: written under a temporary name, synced, renamed.

Used by worker processes too, hence without imports of heavier rooms; ``storing`` turns the disk's refusals into the
error that users see.
"""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hlat.runtime import StorageError

_REFUSALS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
}


def write_atomic(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file so that a crash at any moment leaves the whole of it or nothing under its name.

    Raises:
        OSError: the disk refused; nothing is left behind.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class AtomicFileWriter:
    """A file that is written bit by bit, and gets its name once it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.with_name(f"{path.name}.tmp").open("wb")
        self._digest = hashlib.sha256()

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def write(self, part: bytes) -> None:
        """Write some more.

        Raises:
            OSError: the disk refused.
        """
        self._file.write(part)
        self._digest.update(part)

    def close(self, checksum_suffix: str | None = None) -> str:
        """Finish the file; returns its sha256.

        Args:
            checksum_suffix: ending of a file beside this one that gets the sha256 first, so that a file that exists has one.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sha256 = self._digest.hexdigest()
        if checksum_suffix is not None:
            write_atomic(self._path.with_name(f"{self._path.name}{checksum_suffix}"), sha256.encode())
        Path(self._file.name).replace(self._path)
        return sha256

    def abandon(self) -> None:
        """Close and remove what is not finished, also where the disk refuses what is left in its buffer."""
        Path(self._file.name).unlink(missing_ok=True)
        with suppress(OSError):  # closing writes the rest, and a full disk refuses that too
            self._file.close()


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_disk_error(number: int | None) -> bool:
    """Whether an errno means that the disk refused, rather than that we asked for nonsense."""
    return number in _REFUSALS


@contextmanager
def convert_disk_errors(folder: Path, chosen_by: str = "data.prepared_dir") -> Iterator[None]:
    """Turn the disk's refusals into StorageError, naming the folder, what chooses it, and what to do."""
    try:
        yield
    except OSError as error:
        if not is_disk_error(error.errno):
            raise
        raise storage_error(folder, os.strerror(error.errno or 0), chosen_by) from error


def storage_error(folder: Path, reason: str, chosen_by: str = "data.prepared_dir") -> Exception:
    """The StorageError for a folder that could not be written to."""
    return StorageError(
        f"{folder}: cannot write prepared data: {reason}. Free space or make the folder writable, or choose another "
        f"one with {chosen_by}; then run the same command again: finished work is kept."
    )
