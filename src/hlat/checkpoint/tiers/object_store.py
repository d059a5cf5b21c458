"""The objects below one prefix of a store: put, created, read, listed and removed, each with some patience.

    local file --read, hashed--> object          only if the hash is the one that the manifest has
    object --read, hashed--> local file          the caller compares
    bytes --create--> object, or False           if there is one of that name already

A request that fails for a passing reason is made again after 1, 2, 4, ... seconds. What lasts is a StorageError.

``create`` is one conditional request on S3, GCS and Azure. On a store without such requests it is a look followed by a
put: of two writers at the same instant the later one wins, and the other one's next look tells it.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hlat.checkpoint.format import READ_REMEDY, RUN_REMEDY, Disk, FileRecord, HashedFile, storage_error
from hlat.runtime import CheckpointError, HlatError, StorageError
from hlat.runtime.storage import FailureKind, classify_error, explain_failure, open_filesystem

_PART_BYTES = 1 << 24  # of a request: long beside its latency; S3 takes 10,000 of them for an object
_FIRST, _LONGEST = 1.0, 60.0  # seconds between attempts

T = TypeVar("T")


class _Broken(Exception):
    """Carries an error of the store past those of the local disk."""


class ObjectStoreClient:
    """The objects below a prefix. Names are relative to it, with '/' between parts.

    Args:
        url: the prefix.
        retries: how often a request is made again.
        sleep: waits for seconds.

    Raises:
        CheckpointError: the URL cannot be used, or its backend is not installed.
    """

    def __init__(self, url: str, retries: int = 3, sleep: Callable[[float], None] = time.sleep) -> None:
        self.url = url.rstrip("/")
        self._retries, self._sleep = retries, sleep
        self._backend: tuple[Any, str] | None = None

    def list_names(self, folder: str = "") -> list[str]:
        """The names of what is directly below a folder of the prefix; none if there is no such folder.

        Raises:
            StorageError: the store does not answer, or refuses.
        """

        def ask() -> list[str]:
            fs, root = self._connected()
            at = f"{root}/{folder}".rstrip("/")
            fs.invalidate_cache()
            try:
                found = fs.ls(at, detail=False)
            except FileNotFoundError:
                return []
            return [name for path in found if (name := str(path).rstrip("/").removeprefix(at).strip("/"))]

        return self._try(f"listing {self.url_of(folder)}", folder, ask)

    def read(self, name: str) -> bytes | None:
        """A small object; None if there is none. Raises what ``entries`` does."""

        def ask() -> bytes | None:
            fs, root = self._connected()
            try:
                return bytes(fs.cat_file(f"{root}/{name}"))
            except FileNotFoundError:
                return None

        return self._try(f"reading {self.url_of(name)}", name, ask)

    def put(self, name: str, data: bytes) -> None:
        """Write a small object. Raises what ``entries`` does."""

        def ask() -> None:
            fs, root = self._connected()
            fs.pipe_file(f"{root}/{name}", data)

        self._try(f"writing {self.url_of(name)}", name, ask)

    def create(self, name: str, data: bytes) -> bytes:
        """Write a small object if there is none of that name. Raises what ``entries`` does.

        Returns:
            What the object holds now: ``data``, or what it held before.
        """

        def ask() -> bytes:
            fs, root = self._connected()
            with suppress(FileExistsError):
                fs.pipe_file(f"{root}/{name}", data, mode="create")
            return bytes(fs.cat_file(f"{root}/{name}"))  # also after an answer that was lost on its way

        return self._try(f"writing {self.url_of(name)}", name, ask)

    def remove(self, name: str) -> None:
        """Remove an object, or all below a name; nothing happens if there is none. Raises what ``entries`` does."""

        def ask() -> None:
            fs, root = self._connected()
            fs.invalidate_cache()
            with suppress(FileNotFoundError):
                fs.rm(f"{root}/{name}", recursive=True)

        self._try(f"removing {self.url_of(name)}", name, ask)

    def upload(self, source: Path, name: str, record: FileRecord) -> None:
        """Write a file to an object, if it is what it should be.

        Raises:
            CheckpointError: the file does not match the record. There may be a part of the object.
            StorageError: the file cannot be read, or what ``entries`` raises.
        """
        self._try(f"writing {self.url_of(name)}", name, lambda: self._send(source, name, record))

    def download(self, name: str, disk: Disk, target: Path) -> FileRecord | None:
        """Write an object to a new file, durably; None if there is none.

        Raises:
            StorageError: the disk refused, or what ``entries`` raises.
        """
        return self._try(f"reading {self.url_of(name)}", name, lambda: self._receive(name, disk, target))

    def hash_object(self, name: str) -> FileRecord | None:
        """Length and hash of an object, all of which is read; None if there is none. Raises what ``entries`` does."""

        def ask() -> FileRecord:
            size, digest = 0, hashlib.sha256()
            for piece in self._pieces(name):
                size += len(piece)
                digest.update(piece)
            return FileRecord(size, digest.hexdigest())

        return self._try(f"reading {self.url_of(name)}", name, lambda: _unless_missing(ask))

    def url_of(self, name: str) -> str:
        """The URL of a name."""
        return f"{self.url}/{name}".rstrip("/")

    def _connected(self) -> tuple[Any, str]:
        if self._backend is None:
            self._backend = open_filesystem(self.url, CheckpointError)
        return self._backend

    def _send(self, source: Path, name: str, record: FileRecord) -> None:
        fs, root = self._connected()
        out = fs.open(f"{root}/{name}", "wb", block_size=_PART_BYTES)
        try:
            digest = hashlib.sha256()
            for piece in _read(source):
                digest.update(piece)
                out.write(piece)
            if digest.hexdigest() != record.sha256:
                raise CheckpointError(f"{source}: does not match its checksum any more; it is not uploaded.")
            out.close()
        except BaseException:
            with suppress(Exception):  # what is wrong is known already
                out.discard()
            out.closed = True  # or it would be closed, which completes the object, when it is collected
            raise

    def _receive(self, name: str, disk: Disk, target: Path) -> FileRecord | None:
        def ask() -> FileRecord:
            try:
                if target.exists():  # an attempt that broke off
                    disk.remove_file(target)
                with HashedFile(disk, target) as file:
                    for piece in self._pieces(name):
                        file.write(piece)
                        file.check()
            except OSError as exc:
                doing = f"cannot keep a copy of {self.url_of(name)}"
                raise storage_error(exc, doing, target.parent, remedy=RUN_REMEDY) from exc
            return file.record

        return _unless_missing(ask)

    def _pieces(self, name: str) -> Iterator[bytes]:
        fs, root = self._connected()
        try:
            with fs.open(f"{root}/{name}", "rb", block_size=_PART_BYTES, cache_type="none") as remote:
                while piece := remote.read(_PART_BYTES):
                    yield piece
        except Exception as error:
            raise _Broken from error

    def _try(self, what: str, name: str, action: Callable[[], T]) -> T:
        """The result of an action that may be done again after it failed."""
        for attempt in range(self._retries + 1):
            try:
                return action()
            except HlatError:
                raise
            except Exception as error:
                fault = classify_error(error)
                if fault.kind is not FailureKind.TRANSIENT:
                    raise StorageError(
                        explain_failure(self.url_of(name), fault, "read, write, list and remove")
                    ) from error
                if attempt == self._retries:
                    raise StorageError(
                        f"{what}: {fault.reason}, in {attempt + 1} attempts. See whether {self.url} can be reached "
                        "from here."
                    ) from error
            self._sleep(min(_FIRST * 2**attempt, _LONGEST))
        raise AssertionError("the last attempt returns or raises")


def _unless_missing(ask: Callable[[], FileRecord]) -> FileRecord | None:
    try:
        return ask()
    except _Broken as broken:
        if isinstance(broken.__cause__, FileNotFoundError):
            return None
        raise


def _read(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(_PART_BYTES):
                yield piece
    except OSError as exc:
        raise storage_error(exc, f"cannot read {path.name}", path.parent, remedy=READ_REMEDY) from exc
