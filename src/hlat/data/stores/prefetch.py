"""Files one after the other, those of remote stores fetched while earlier ones are read.

    files --threads, a few ahead--> held in the cache --in order--> the reader, who lets each go before the next

How many are ahead is bounded by their number and by a share of the cache, so that fetching ahead never takes the room
of the file that is read.
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

_AHEAD = 16  # files: asking for a small one takes longer than sending it
_THREADS = 8
_SHARE = 4  # a quarter of the cache
_LAST_SECONDS = 5.0


class Openable(Protocol):
    """A file that may have to be fetched."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def cache_limit(self) -> int | None:
        """Bytes of the cache that it is fetched into; None for a file that is here."""

    def open_local(self, wanted: Callable[[], bool]) -> AbstractContextManager[Path]:
        """The file on this machine; fetching it ends early once it is not wanted any more."""


F = TypeVar("F", bound=Openable)


class _Held(NamedTuple):
    path: Path
    hold: ExitStack  # lets the file go


class _Task(NamedTuple):
    file: Openable
    result: "Future[_Held]"


def prefetch_in_order(files: Sequence[F]) -> Generator[tuple[F, Path], None, None]:
    """Each file, and where it can be read until the next one is asked for; close the iterator to stop early.

    Raises:
        Exception: what ``open_local`` raised for a file, when it is the file's turn.
    """
    threads = _Threads()
    pending: deque[Future[_Held]] = deque()
    ahead = 0  # bytes of the files after the one whose turn it is
    try:
        for index, file in enumerate(files):
            if not pending:
                pending.append(threads.open(file))
            else:
                ahead -= file.size
            while (following := index + len(pending)) < len(files) and len(pending) <= _AHEAD:
                candidate = files[following]
                if not _may_go_ahead(candidate, ahead, file):
                    break
                ahead += candidate.size
                pending.append(threads.open(candidate))
            held = pending.popleft().result()
            with held.hold:
                yield file, held.path
    finally:
        threads.stop()
        for future in pending:
            future.add_done_callback(_let_go)


def _may_go_ahead(candidate: Openable, ahead: int, current: Openable) -> bool:
    cache_limit = candidate.cache_limit
    if cache_limit is None:
        return False
    ahead += candidate.size
    return ahead <= cache_limit // _SHARE and ahead + current.size <= cache_limit


def _let_go(future: "Future[_Held]") -> None:
    if future.exception() is None:
        future.result().hold.close()


class _Threads:
    """Threads that open files; they end by themselves, as soon as they notice that nobody wants anything."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()

    def open(self, file: Openable) -> "Future[_Held]":
        """The file, opened at once if it is here, else by a thread."""
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
        """Nothing is wanted any more; threads get a while to remove what they have half fetched.

        Not longer, since a store that is away may keep one for a minute: then the next start removes it.
        """
        self._stopped.set()
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + _LAST_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._open(task)

    def _open(self, task: _Task) -> None:
        hold = ExitStack()
        try:
            path = hold.enter_context(task.file.open_local(lambda: not self._stopped.is_set()))
        except BaseException as error:
            task.result.set_exception(error)
        else:
            task.result.set_result(_Held(path, hold))
