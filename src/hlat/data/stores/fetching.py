"""Download remote files into the cache, and fetch the next ones while the caller reads the current one.

    attempt: resume where the last one stopped --bytes--> local file, sha256 computed on the way
    length as listed? version still the one that was listed? --> done                            (fetch)

    files --threads, a few ahead--> locked in the cache --in order--> the caller, who releases each before the next
                                                                                                 (prefetch_in_order)

Bytes of another version are always noticed: the version is compared before every further attempt and after the last.
A caller that knows the sha256 from an earlier download compares it too.

The number of prefetched files and their share of the cache are bounded, so that prefetching never takes the space of
the file that is being read.
"""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import IO, NamedTuple, Protocol, TypeVar

from hlat.data.stores.cache import Cache
from hlat.data.stores.remote import FetchCancelledError, RetryLoop, Store, StoredFile, access_error
from hlat.runtime.errors import DataError
from hlat.runtime.storage.object_stores import TransientError


@dataclass(frozen=True)
class CachedStore:
    """A remote store together with the local cache of its files."""

    store: Store
    cache: Cache

    @contextmanager
    def acquire(self, file: StoredFile, still_needed: Callable[[], bool]) -> Iterator[Path]:
        """Yield the local path of a remote file; errors of ``fetch`` and of ``Cache.acquire``."""
        with self.cache.acquire(file, lambda out: fetch(self.store, file, out, still_needed)) as path:
            yield path


def fetch(store: Store, file: StoredFile, out: IO[bytes], still_needed: Callable[[], bool]) -> str:
    """Download a file into ``out``, a seekable, unbuffered file, and return the sha256.

    DataError if it is missing, denied or replaced, or the outage exceeds ``MAX_OUTAGE_SECONDS``; OSError of the local
    disk; FetchCancelledError if ``still_needed`` returns False.
    """
    attempts = store.retries.attempt(f"reading {file.path}", still_needed)
    transfer = _Transfer(store, file, out, attempts, still_needed)
    attempts.call(transfer.run, partial(access_error, file.path))
    # Only here: raised in an attempt, it would be taken for an error of the store.
    if transfer.disk_error is not None:
        raise transfer.disk_error
    return transfer.digest.hexdigest()


class _Transfer:
    """State of one download: bytes received, their sha256, and the error of the local disk, if any."""

    def __init__(
        self, store: Store, file: StoredFile, out: IO[bytes], attempts: RetryLoop, still_needed: Callable[[], bool]
    ) -> None:
        self._store, self._file, self._out = store, file, out
        self._attempts, self._still_needed = attempts, still_needed
        self._done = self._furthest = 0  # bytes of this attempt, and the most bytes of any attempt
        self._is_retry = False
        self.digest = hashlib.sha256()
        self.disk_error: OSError | None = None

    def run(self) -> None:
        """Make one attempt: receive bytes until the file is complete or an error occurs."""
        if self._is_retry:
            self._store.check_version(self._file)
        self._is_retry = True
        if not self._store.supports_ranges:  # else it goes on where the last attempt stopped
            self._out.seek(0)
            self._done = 0
            self.digest = hashlib.sha256()
        if not self._receive():
            return
        if self._done < self._file.size:
            raise TransientError(f"only {self._done:,} of {self._file.size:,} bytes were received")
        self._store.check_version(self._file)

    def _receive(self) -> bool:
        """Receive and write bytes; return False on an error of the local disk."""
        for chunk in self._store.read(self._file, self._done):
            if not self._still_needed():
                raise FetchCancelledError
            self._done += len(chunk)
            if self._done > self._file.size:
                raise DataError(
                    f"{self._file.path}: the server sends more than the {self._file.size:,} bytes that it reports for "
                    "the file: it may compress the transfer, or the file is being written. Run again once it is "
                    "complete."
                )
            try:
                _write_all(self._out, chunk)
            except OSError as error:
                self.disk_error = error
                return False
            self.digest.update(chunk)
            # A download that always starts again and always stops before this makes no progress.
            if self._done > self._furthest:
                self._furthest = self._done
                self._attempts.progress()
        return True


def _write_all(out: IO[bytes], chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[out.write(rest) :]  # one write to an unbuffered file may take only some of its bytes


_MAX_AHEAD = 16  # files; for a small file the request takes longer than the transfer
_THREADS = 8
_CACHE_DIVISOR = 4  # prefetched files take at most a quarter of the cache
_JOIN_SECONDS = 5.0


class Openable(Protocol):
    """A local file, or a remote one that is fetched when it is opened."""

    @property
    def size(self) -> int:
        """Size in bytes, of a remote file too."""

    @property
    def cache_limit(self) -> int | None:
        """Size limit in bytes of the cache that the file is fetched into; None for a local file."""

    def open_local(self, still_needed: Callable[[], bool]) -> AbstractContextManager[Path]:
        """Return a context with the local path; fetching is cancelled once ``still_needed`` returns False."""


F = TypeVar("F", bound=Openable)


class _LocalFile(NamedTuple):
    path: Path
    release: ExitStack  # closing it releases the file


class _Task(NamedTuple):
    file: Openable
    result: "Future[_LocalFile]"


def prefetch_in_order(files: Sequence[F]) -> Generator[tuple[F, Path], None, None]:
    """Yield each file with a local path, valid until the next is requested; close the iterator to stop early.

    Whatever ``open_local`` raised for a file is raised when that file is reached.
    """
    threads = _Threads()
    pending: deque[Future[_LocalFile]] = deque()
    ahead = 0  # bytes of the files opened after the current one
    try:
        for index, file in enumerate(files):
            if not pending:
                pending.append(threads.open(file))
            else:
                ahead -= file.size
            while (following := index + len(pending)) < len(files) and len(pending) <= _MAX_AHEAD:
                candidate = files[following]
                if not _may_prefetch(candidate, ahead, file):
                    break
                ahead += candidate.size
                pending.append(threads.open(candidate))
            local = pending.popleft().result()
            with local.release:
                yield file, local.path
    finally:
        threads.stop()
        for future in pending:
            future.add_done_callback(_release)  # whatever was still being fetched is released as soon as it is there


def _may_prefetch(candidate: Openable, ahead: int, current: Openable) -> bool:
    """Return True if a file is remote and the cache has space for it next to all that are open."""
    cache_limit = candidate.cache_limit
    if cache_limit is None:
        return False
    ahead += candidate.size
    return ahead <= cache_limit // _CACHE_DIVISOR and ahead + current.size <= cache_limit


def _release(future: "Future[_LocalFile]") -> None:
    if future.exception() is None:
        future.result().release.close()


class _Threads:
    """Threads that open files; after ``stop`` they end on their own as soon as they notice it."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()

    def open(self, file: Openable) -> "Future[_LocalFile]":
        """Open a local file at once, or have a thread fetch a remote one; return a future of its path."""
        task = _Task(file, Future())
        if file.cache_limit is None:
            self._open(task)
        else:
            self._tasks.put(task)
            if len(self._threads) < _THREADS:
                self._threads.append(threading.Thread(target=self._serve, daemon=True))
                self._threads[-1].start()
        return task.result

    def stop(self) -> None:
        """Cancel all fetches and give the threads a few seconds to remove their partial files."""
        self._stopped.set()
        for _ in self._threads:
            self._tasks.put(None)
        # Short, because an unreachable store can block a thread for a minute; then the next start removes the partial
        # file.
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._open(task)

    def _open(self, task: _Task) -> None:
        release = ExitStack()
        try:
            path = release.enter_context(task.file.open_local(lambda: not self._stopped.is_set()))
        except BaseException as error:
            task.result.set_exception(error)
        else:
            task.result.set_result(_LocalFile(path, release))
