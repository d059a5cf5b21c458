"""Atomic file writes: a file is either complete under its final name, or absent.

    bytes --write--> temporary file --fsync--> --rename--> final name

Worker processes import this module, so it imports no heavier room. ``convert_disk_errors`` turns an OSError of the
local disk into the StorageError that users see.
"""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hlat.runtime.errors import StorageError

_DISK_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
}


def write_atomic(path: Path, *chunks: bytes | memoryview) -> None:
    """Write a file so that a crash at any moment leaves either the complete file or nothing under its name.

    Raises:
        OSError: the disk refused the write; no temporary file is left behind.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class AtomicFileWriter:
    """A file written chunk by chunk under a temporary name; ``close`` gives it its final name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.with_name(f"{path.name}.tmp").open("wb")
        self._digest = hashlib.sha256()

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def write(self, chunk: bytes) -> None:
        """Append a chunk.

        Raises:
            OSError: the disk refused the write.
        """
        self._file.write(chunk)
        self._digest.update(chunk)

    def close(self, checksum_suffix: str | None = None) -> str:
        """Sync the file, give it its final name, and return its sha256.

        Args:
            checksum_suffix: if given, the sha256 is first written to the file's name plus this suffix, so that a
                file that exists under its final name always has a checksum file.

        Raises:
            OSError: the disk refused the write.
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
        """Close and remove an unfinished file, even if the disk refuses to flush its buffer."""
        Path(self._file.name).unlink(missing_ok=True)
        with suppress(OSError):  # closing flushes the buffer, and a full disk refuses that too
            self._file.close()


def sync_folder(path: Path) -> None:
    """Call fsync on a folder, so that creations and renames in it survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_disk_error(number: int | None) -> bool:
    """Return True if an errno says that the disk refused an operation (full, read-only, no permission, I/O error)."""
    return number in _DISK_ERRORS


@contextmanager
def convert_disk_errors(folder: Path, chosen_by: str = "data.prepared_dir") -> Iterator[None]:
    """Convert an OSError of the disk into a StorageError that names the folder and says what to do.

    Args:
        folder: the folder that is written to.
        chosen_by: the recipe field or command-line option that sets the folder.

    Raises:
        StorageError: the disk refused an operation. Any other OSError is passed on.
    """
    try:
        yield
    except OSError as error:
        if not is_disk_error(error.errno):
            raise
        raise unwritable_folder_error(folder, os.strerror(error.errno or 0), chosen_by) from error


def unwritable_folder_error(folder: Path, reason: str, chosen_by: str = "data.prepared_dir") -> Exception:
    """Build the StorageError for a folder that could not be written to."""
    return StorageError(
        f"{folder}: cannot write prepared data: {reason}. Free space or make the folder writable, or choose another "
        f"one with {chosen_by}; then run the same command again: finished work is kept."
    )
