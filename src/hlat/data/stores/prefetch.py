"""Prefetch of remote files: threads fetch the next files while the caller reads the current one.

    files --threads, a few ahead--> locked in the cache --in order--> the caller, who releases each before the next

The number of prefetched files and their share of the cache are bounded, so that prefetching never takes the space of
the file that is being read.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Protocol, TypeVar

_MAX_AHEAD = 16  # files; for a small file the request takes longer than the transfer
_THREADS = 8
_CACHE_DIVISOR = 4  # prefetched files take at most a quarter of the cache
_JOIN_SECONDS = 5.0


class Openable(Protocol):
    """A local file, or a remote one that is fetched when it is opened."""

    @property
    def size(self) -> int:
        """Size in bytes."""

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
    """Yield each file with a local path, valid until the next file is requested; close the iterator to stop early.

    Raises:
        Exception: whatever ``open_local`` raised for a file, when that file is reached.
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
            future.add_done_callback(_release)


def _may_prefetch(candidate: Openable, ahead: int, current: Openable) -> bool:
    """Return True if a file is remote and the cache has space for it next to the current one and those ahead."""
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
        """Cancel all fetches and give the threads a few seconds to remove their partial files.

        The wait is short because an unreachable store can block a thread for a minute; in that case the next start
        removes the partial file.
        """
        self._stopped.set()
        for _ in self._threads:
            self._tasks.put(None)
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
