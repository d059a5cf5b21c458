"""Client for the objects below one prefix of an object store: put, create, read, list and remove, with retries.

    local file --read, hashed--> object          completed only if the hash equals that of the manifest
    object --read, hashed--> local file          the caller compares the hash
    bytes --create--> object                     unless there is an object of that name

A request that fails for a transient reason is retried after 1, 2, 4, ... seconds. Other errors, and the last failed
retry, become a StorageError.

``create`` is one conditional request on S3, GCS and Azure. A store without conditional requests gets a lookup followed
by a put. If two writers do this at the same time, the later one wins, and the other one sees it when it reads the
object back.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from hlat.checkpoint.format.filesystem import READ_REMEDY, Disk, FileRecord, HashedFile, storage_errors
from hlat.runtime.errors import CheckpointError, HlatError, StorageError
from hlat.runtime.progress import advance, blocking_call
from hlat.runtime.storage.object_stores import FailureKind, classify_error, explain_failure, open_filesystem
from hlat.runtime.storage.run_folder import EarlierAttempt
from hlat.runtime.terminal import plural

_PART_BYTES = 1 << 24  # bytes per request: transfer time exceeds latency; S3 allows 10,000 of them per object
_FIRST, _LONGEST = 1.0, 60.0  # backoff between attempts, in seconds

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


class _StoreError(Exception):
    """Error of the object store, wrapped to tell it from errors of the local disk."""


def _request(doing: str, named_by: int = 0) -> Callable[[Method], Method]:
    """Make a method a request about the object that argument ``named_by`` names: retried, with errors that name it."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def retried(self: "ObjectStoreClient", *arguments: Any) -> Any:
            name = arguments[named_by] if arguments else ""
            return self._with_retries(f"{doing} {self.url_of(name)}", name, lambda: method(self, *arguments))

        return cast(Method, retried)

    return decorate


class ObjectStoreClient:
    """Client for the objects below a prefix. Object names are relative to the prefix, with '/' as separator.

    The first request connects to the store, and raises CheckpointError if the URL cannot be used or its backend is not
    installed. A request that fails after at most ``retries`` retries, or is denied, raises StorageError.
    """

    def __init__(self, url: str, retries: int = 3, sleep: Callable[[float], None] = time.sleep) -> None:
        self.url = url.rstrip("/")
        self._retries, self._sleep = retries, sleep
        self._backend: tuple[Any, str] | None = None
        self._has_answered = EarlierAttempt.read() is not None  # a run that goes on has reached it before

    @_request("listing")
    def list_names(self, folder: str = "") -> list[str]:
        """List the names directly below a folder of the prefix; empty if there is no such folder."""
        fs, root = self._connect()
        at = f"{root}/{folder}".rstrip("/")
        # fsspec caches listings, and other processes write to the store.
        fs.invalidate_cache()
        try:
            found = fs.ls(at, detail=False)
        except FileNotFoundError:
            return []
        return [name for path in found if (name := str(path).rstrip("/").removeprefix(at).strip("/"))]

    @_request("reading")
    def read(self, name: str) -> bytes | None:
        """Read a small object; None if it does not exist."""
        fs, root = self._connect()
        try:
            return bytes(fs.cat_file(f"{root}/{name}"))
        except FileNotFoundError:
            return None

    @_request("writing")
    def put(self, name: str, data: bytes) -> None:
        fs, root = self._connect()
        fs.pipe_file(f"{root}/{name}", data)

    @_request("writing")
    def create(self, name: str, data: bytes) -> bytes:
        """Write a small object unless one of that name exists; return its content now: ``data``, or an earlier one."""
        fs, root = self._connect()
        with suppress(FileExistsError):
            fs.pipe_file(f"{root}/{name}", data, mode="create")
        # Read back, also because the response to the write may have been lost.
        return bytes(fs.cat_file(f"{root}/{name}"))

    @_request("removing")
    def remove(self, name: str) -> None:
        """Remove an object, or all objects below a name, if any."""
        fs, root = self._connect()
        fs.invalidate_cache()
        with suppress(FileNotFoundError):
            fs.rm(f"{root}/{name}", recursive=True)

    @_request("writing", named_by=1)
    def upload(self, source: Path, name: str, record: FileRecord) -> None:
        """Upload a file, and complete the object only if it matches its record; CheckpointError if it does not."""
        fs, root = self._connect()
        out = fs.open(f"{root}/{name}", "wb", block_size=_PART_BYTES)
        try:
            digest = hashlib.sha256()
            for block in _read_file(source):
                digest.update(block)
                out.write(block)
                advance()
            if digest.hexdigest() != record.sha256:
                raise CheckpointError(f"{source}: does not match its checksum any more and is not uploaded.")
            out.close()
        except BaseException:
            with suppress(Exception):  # the first error is the one to raise
                out.discard()
            out.closed = True  # else the garbage collector closes it, which would complete the object
            raise

    @_request("reading")
    def download(self, name: str, disk: Disk, target: Path) -> FileRecord | None:
        """Download an object to a new file and fsync it; return its size and hash, or None if it does not exist."""
        failing = storage_errors(f"cannot write a local copy of {self.url_of(name)}", target.parent)
        try:
            with failing:
                if target.exists():  # left by an interrupted attempt
                    disk.remove_file(target)
                with HashedFile(disk, target) as file:
                    for block in self._read_blocks(name):
                        file.write(block)
                        file.check()
            return file.record
        except _StoreError as error:
            _raise_unless_missing(error)
            return None

    @_request("reading")
    def hash_object(self, name: str) -> FileRecord | None:
        """Size and hash of an object, which is read completely; None if it does not exist."""
        size, digest = 0, hashlib.sha256()
        try:
            for block in self._read_blocks(name):
                size += len(block)
                digest.update(block)
        except _StoreError as error:
            _raise_unless_missing(error)
            return None
        return FileRecord(size, digest.hexdigest())

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}".rstrip("/")

    def _connect(self) -> tuple[Any, str]:
        if self._backend is None:
            self._backend = open_filesystem(self.url, CheckpointError)
        return self._backend

    def _read_blocks(self, name: str) -> Iterator[bytes]:
        fs, root = self._connect()
        try:
            # No cache: the object is read once, from its beginning to its end.
            with fs.open(f"{root}/{name}", "rb", block_size=_PART_BYTES, cache_type="none") as remote:
                while block := remote.read(_PART_BYTES):
                    advance()
                    yield block
        except Exception as error:
            raise _StoreError from error

    def _with_retries(self, request_name: str, name: str, action: Callable[[], T]) -> T:
        for attempt in range(self._retries + 1):
            try:
                with blocking_call():
                    result = action()
                self._has_answered = True
                return result
            # The local disk failed, or the object is damaged: another request would not help.
            except HlatError:
                raise
            except Exception as error:
                failure = classify_error(error)
                # A name that does not resolve is an outage only of a store that has been there before.
                is_outage = failure.kind is FailureKind.NO_HOST and self._has_answered
                if failure.kind is not FailureKind.TRANSIENT and not is_outage:
                    raise StorageError(
                        explain_failure(self.url_of(name), failure, "read, write, list and remove")
                    ) from error
                if attempt == self._retries:
                    attempts = plural(attempt + 1, "attempt")
                    raise StorageError(
                        f"{request_name}: {failure.reason}, after {attempts}. Check that {self.url} can be reached "
                        "from this machine."
                    ) from error
            with blocking_call():
                self._sleep(min(_FIRST * 2**attempt, _LONGEST))
        raise AssertionError("the last attempt returns or raises")


def _raise_unless_missing(error: _StoreError) -> None:
    if not isinstance(error.__cause__, FileNotFoundError):
        raise error


def _read_file(path: Path) -> Iterator[bytes]:
    failing = storage_errors(f"cannot read {path.name}", path.parent, remedy=READ_REMEDY)
    with failing, path.open("rb") as file:
        while block := file.read(_PART_BYTES):
            yield block
