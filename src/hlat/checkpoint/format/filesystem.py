"""What saving does to the file system, one operation at a time, and what a refusal means to the user.

Every change the checkpoint room makes on disk goes through a ``Disk``, so that the protocol on top of it can be
proved against a disk that fails, or dies, after any single operation:

    bytes --HashedFile--> disk, hashed on the way, synced when the file closes --> FileRecord for the manifest
"""

import contextlib
import errno
import hashlib
import os
import shutil
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from hlat.runtime import StorageError
from hlat.runtime.distributed import sendable
from hlat.runtime.storage import RunFolder, sync_to_disk

_COPY_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 16


class Disk:
    """The operations that change a file system. Each is one system call, or close to it."""

    def make_folder(self, path: Path) -> None:
        """Create a folder in one that exists; an existing one is left alone."""
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> FileIO:
        """Create a file that must not exist, for unbuffered writing."""
        return FileIO(path, "x")

    def write(self, file: FileIO, data: memoryview) -> int:
        """Write some of the bytes, return how many."""
        return file.write(data)

    def sync_file(self, file: FileIO) -> None:
        """Return when the file's bytes are durable."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Return when the folder's entries (creations, renames, removals) are durable."""
        sync_to_disk(path)

    def rename(self, source: Path, target: Path) -> None:
        """Move within one file system, atomically."""
        source.rename(target)

    def remove_file(self, path: Path) -> None:
        """Remove a file or a symbolic link."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user may still write under ``path``."""
        return shutil.disk_usage(path).free

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and all in it; nothing happens if it is not there. Symbolic links are not followed."""
        if path.is_symlink() or path.is_file():
            self.remove_file(path)
            return
        if not path.is_dir():
            return
        for entry in sorted(path.iterdir()):
            self.remove_tree(entry)
        self.remove_folder(path)

    def discard(self, path: Path) -> None:
        """Remove a tree as far as the disk allows; what stays is removed when the store is opened next."""
        with contextlib.suppress(OSError):
            self.remove_tree(path)


def make_folders(disk: Disk, path: Path, inside: Path | None = None) -> None:
    """Create a folder, and those above it that are missing.

    Args:
        disk: where.
        path: the folder.
        inside: a folder above it that has to exist: where it is gone, its file system may be, and nothing is made in
            its place. None where all of them may be made.

    Raises:
        OSError: the disk refused, or there is no ``inside``.
    """
    if path == inside:
        return
    try:
        disk.make_folder(path)
    except FileNotFoundError:
        if path.parent in (inside, path):
            raise
        make_folders(disk, path.parent, inside)
        disk.make_folder(path)


def make_checkpoints_folder(disk: Disk, root: Path, folder: RunFolder | None) -> None:
    """Make the folder that checkpoints lie in, if it is missing, and never in place of a run's folder that has gone.

    Args:
        disk: where.
        root: the folder.
        folder: of the run, in which it lies; None for no run.

    Raises:
        LostError: the run's folder is gone.
        OSError: the disk refused.
    """
    if folder is None:
        make_folders(disk, root)
        return
    folder.check()
    if root.is_dir():
        return
    make_folders(disk, root, inside=folder.path)
    try:
        folder.check()
    except StorageError:  # it went in between
        disk.discard(root)
        raise


@sendable
@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of one file."""

    bytes: int
    sha256: str


class HashedFile:
    """A new file, written once from start to end, hashed on the way and durable once closed.

    The error of a write is kept, later writes are dropped, and the error is raised by ``check`` and by leaving the
    ``with`` block: torch's zip writer cannot be interrupted inside a record without burying the cause under errors
    of its own.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._file = disk.create(path)
        self._hash = hashlib.sha256()
        self._buffer = bytearray()  # torch.save writes many small pieces
        self._position = 0
        self._error: BaseException | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append all of ``data``; returns its length in bytes."""
        view = memoryview(data).cast("B")
        self._position += len(view)
        if len(self._buffer) + len(view) <= _BUFFER_BYTES:
            self._buffer += view
        else:
            self._put(self._buffer)
            self._buffer = bytearray()
            self._put(view)
        return len(view)

    def _put(self, data: bytearray | memoryview) -> None:
        if self._error is not None:
            return
        self._hash.update(data)
        try:
            view = memoryview(data)
            while view:
                view = view[self._disk.write(self._file, view) :]
        except BaseException as exc:
            self._error = exc

    def tell(self) -> int:
        """Bytes written so far."""
        return self._position

    def flush(self) -> None:
        """For writers that flush: the buffer goes to the disk when the file is complete."""

    def check(self) -> None:
        """Raise the error of an earlier write, if there was one."""
        if self._error is not None:
            raise self._error

    @property
    def record(self) -> FileRecord:
        """Length and hash of what was written."""
        return FileRecord(self._position, self._hash.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._put(self._buffer)
                self.check()
                self._disk.sync_file(self._file)
        finally:
            self._file.close()


def write_file(disk: Disk, path: Path, data: bytes) -> FileRecord:
    """Write a new file durably."""
    with HashedFile(disk, path) as file:
        file.write(data)
    return file.record


def copy_file(disk: Disk, source: Path, path: Path) -> FileRecord:
    """Copy a file durably to a new name."""
    with source.open("rb") as original, HashedFile(disk, path) as file:
        while data := original.read(_COPY_BYTES):
            file.write(data)
            file.check()
    return file.record


@dataclass(frozen=True)
class Remedy:
    """What a user can do when the disk refuses, besides mending it."""

    elsewhere: str
    less: str = ""


RUN_REMEDY = Remedy("use another run.dir", less=", keep fewer checkpoints (checkpoint.keep_last)")
NEW_FOLDER_REMEDY = Remedy("name another folder to write to")
READ_REMEDY = Remedy("read a copy of it elsewhere")

_REMEDY_BY_ERRNO = {
    errno.ENOSPC: "free some space there{less}, or {elsewhere}",
    errno.EDQUOT: "free some of your quota{less}, or {elsewhere}",
    errno.EFBIG: "raise the limit on file size (ulimit -f), or {elsewhere}",
    errno.EROFS: "the file system is mounted read-only: remount it, or {elsewhere}",
    errno.EACCES: "give this user permission there, or {elsewhere}",
    errno.EPERM: "give this user permission there, or {elsewhere}",
    errno.EIO: "the device reports a failure: look at the kernel log, and {elsewhere} until it is replaced",
}


def storage_error(
    exc: OSError, doing: str, folder: Path, needed: int | None = None, remedy: Remedy = RUN_REMEDY
) -> StorageError:
    """The error a user sees when the disk refused.

    Args:
        exc: what the system said.
        doing: what was being done, as in "cannot save the checkpoint of step 40".
        folder: where.
        needed: bytes that the whole operation writes, if known.
        way_out: what else would work for whoever asked for it.
    """
    reason = exc.strerror or str(exc)
    where = f"{exc.filename}: " if exc.filename else ""
    need = "" if needed is None else f" It needs {human_bytes(needed)} ({needed} bytes) in {folder}."
    other = "see that the storage is there and healthy, then run the same command again"
    advice = _REMEDY_BY_ERRNO.get(exc.errno or 0, other).format(less=remedy.less, elsewhere=remedy.elsewhere)
    return StorageError(f"{doing} in {folder}: {where}{reason}.{need} What would work: {advice}.")


def human_bytes(count: int) -> str:
    """A size for people: 1536 -> '1.5 KiB'."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
