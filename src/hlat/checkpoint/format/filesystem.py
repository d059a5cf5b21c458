"""File-system operations of checkpoints, and the errors that users see when one fails.

    bytes --HashedFile--> file, hashed while written, fsynced when it closes --> FileRecord for the manifest

All changes that checkpoints make on disk go through a ``Disk``. Tests replace it with one that fails, or stops, after
any single operation, and check the commit protocol against it.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import CheckpointError, StorageError
from hlat.runtime.progress import blocking_call
from hlat.runtime.quantities import amount_text
from hlat.runtime.storage.local_files import sync_to_disk
from hlat.runtime.storage.run_folder import RunFolder

_COPY_BYTES = 1 << 20  # read at once
_BUFFER_BYTES = 1 << 16  # small writes are collected up to this
_PIECE_BYTES = 1 << 24  # hashed and written at once, so that a large tensor makes progress that others can see
_FICLONE = 0x40049409  # of linux/fs.h
_WEIGHT_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".npz", ".h5")  # of other formats


class Disk:
    """Operations that change a file system. Each is one system call, or close to it.

    A call may take minutes while its storage is slow, which is no hang: all of them are ``blocking_call``.
    """

    @blocking_call()
    def make_folder(self, path: Path) -> None:
        """Create a folder whose parent exists; do nothing if the folder exists."""
        path.mkdir(exist_ok=True)

    @blocking_call()
    def create(self, path: Path) -> FileIO:
        """Create a file for unbuffered writing; the file must not exist."""
        return FileIO(path, "x")

    @blocking_call()
    def write(self, file: FileIO, data: memoryview) -> int:
        """Write some of the bytes; return how many."""
        return file.write(data)

    @blocking_call()
    def sync_file(self, file: FileIO) -> None:
        """Fsync a file: its bytes are durable when this returns."""
        os.fsync(file.fileno())

    @blocking_call()
    def sync_folder(self, path: Path) -> None:
        """Fsync a folder: creations, renames and removals in it are durable when this returns."""
        sync_to_disk(path)

    @blocking_call()
    def rename(self, source: Path, target: Path) -> None:
        """Rename atomically, within one file system."""
        source.rename(target)

    @blocking_call()
    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, within one file system: its bytes exist once."""
        os.link(source, target, follow_symlinks=False)

    @blocking_call()
    def share(self, source: Path, file: FileIO) -> None:
        """Let a new file have the bytes of another by reference, copied when one is written (FICLONE of Linux)."""
        with source.open("rb") as original:
            fcntl.ioctl(file.fileno(), _FICLONE, original.fileno())

    @blocking_call()
    def remove_file(self, path: Path) -> None:
        path.unlink()

    @blocking_call()
    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    @blocking_call()
    def free_bytes(self, path: Path) -> int:
        """Bytes that this user can still write under ``path``."""
        return shutil.disk_usage(path).free

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and its content, if it exists. Symbolic links are not followed."""
        if path.is_symlink() or path.is_file():
            self.remove_file(path)
            return
        if not path.is_dir():
            return
        for entry in sorted(path.iterdir()):
            self.remove_tree(entry)
        self.remove_folder(path)

    def discard(self, path: Path) -> None:
        """Remove a tree as far as possible, without errors. The next opening of the store removes what is left."""
        with contextlib.suppress(OSError):
            self.remove_tree(path)


def make_folders(disk: Disk, path: Path, inside: Path | None = None) -> None:
    """Create a folder and its missing parents up to ``inside``, which has to exist; None may create all."""
    if path == inside:
        return
    try:
        disk.make_folder(path)
    except FileNotFoundError:
        # A missing ``inside`` is never created: its file system may be unmounted. A root is its own parent.
        if path.parent in (inside, path):
            raise
        make_folders(disk, path.parent, inside)
        disk.make_folder(path)


def refuse_file_name(target: Path, what: str) -> None:
    """Raise CheckpointError for a folder to be written with the ending of a weight file, such as .gguf."""
    # The user expects another format there.
    ending = target.suffix.lower()
    if ending in _WEIGHT_FILES:
        folder = target.with_suffix("")
        hint = " llama.cpp's convert_hf_to_gguf.py makes a .gguf file of an export." if ending == ".gguf" else ""
        raise CheckpointError(f"{target}: {what}, not a {ending} file. Name a folder, such as {folder}.{hint}")


def check_new_folder(target: Path) -> None:
    """Raise CheckpointError unless a folder does not exist or is empty, and is not named like a weight file."""
    refuse_file_name(target, "a checkpoint is a folder")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target}: exists already and is not empty. Name a folder that does not exist yet.")


def make_checkpoints_folder(disk: Disk, root: Path, folder: RunFolder | None) -> None:
    """Create the folder for checkpoints if missing; StateLostError if the run folder around it has disappeared."""
    if folder is None:
        make_folders(disk, root)
        return
    folder.check()
    if root.is_dir():
        return
    make_folders(disk, root, inside=folder.path)
    try:
        folder.check()
    except StorageError:  # it disappeared after the first check
        disk.discard(root)
        raise


@sendable
@dataclass(frozen=True)
class FileRecord:
    """Size and hash of a file, as listed in the manifest."""

    bytes: int
    sha256: str


class HashedFile:
    """A new file that is written once, sequentially, hashed while written, and fsynced when it closes.

    If a write fails, its error is stored and later writes do nothing. ``check`` raises the error, and so does leaving
    the ``with`` block. The reason: an exception inside torch's zip writer is hidden by errors of the zip writer.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._file = disk.create(path)
        self._hash = hashlib.sha256()
        self._buffer = bytearray()  # torch.save makes many small writes
        self._position = 0
        self._error: BaseException | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append all of ``data``; return its length in bytes."""
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
        try:
            for begin in range(0, len(data), _PIECE_BYTES):
                view = memoryview(data)[begin : begin + _PIECE_BYTES]
                self._hash.update(view)
                # A raw write may take only some of the bytes.
                while view:
                    view = view[self._disk.write(self._file, view) :]
        except BaseException as exc:
            self._error = exc

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """Do nothing: the buffer is written when the file is complete. Some writers need this method."""

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._position, self._hash.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # After an error the file is not complete, and its bytes need not be durable.
            if kind is None:
                self._put(self._buffer)
                self.check()
                self._disk.sync_file(self._file)
        finally:
            self._file.close()


def write_file(disk: Disk, path: Path, data: bytes) -> FileRecord:
    """Write a new file and fsync it."""
    with HashedFile(disk, path) as file:
        file.write(data)
    return file.record


def copy_file(disk: Disk, source: Path, path: Path) -> FileRecord:
    """Copy a file to a new file and fsync it."""
    with source.open("rb") as original, HashedFile(disk, path) as file:
        while data := original.read(_COPY_BYTES):
            file.write(data)
            file.check()
    return file.record


@dataclass(frozen=True)
class Remedy:
    """Advice for a user whose storage failed, besides repairing it; phrases that complete a sentence."""

    elsewhere: str  # use of other storage
    less: str = ""  # use of less space; empty if there is no way


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
    exc: OSError, failure: str, folder: Path, needed: int | None = None, remedy: Remedy = RUN_REMEDY
) -> StorageError:
    """Build the error that a user sees when a file-system operation failed, with what would help."""
    reason = exc.strerror or str(exc)
    where = f"{exc.filename}: " if exc.filename else ""
    need = "" if needed is None else f" It needs {amount_text(needed, 'B')} ({needed} bytes) in {folder}."
    other = "check that the storage is mounted and healthy, then run the same command again"
    advice = _REMEDY_BY_ERRNO.get(exc.errno or 0, other).format(less=remedy.less, elsewhere=remedy.elsewhere)
    return StorageError(f"{failure} in {folder}: {where}{reason}.{need} What would work: {advice}.")


@contextlib.contextmanager
def storage_errors(
    failure: str, folder: Path | None, needed: int | None = None, remedy: Remedy = RUN_REMEDY
) -> Iterator[None]:
    """Turn an OSError in the block into the error that a user sees; ``folder`` None is the place that failed."""
    try:
        yield
    except OSError as exc:
        raise storage_error(exc, failure, folder or Path(exc.filename or "."), needed, remedy) from exc
