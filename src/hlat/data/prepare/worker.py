"""Worker processes and their pool: work units in, numbers of finished units out, a bounded number of units in flight.

    WorkerPool --WorkUnit--> helper process --(unit files)--> staging folder
               <--- its number, or an error ---

A worker is a new interpreter instead of a fork, because the parent may have threads of torch. It imports this module,
so no torch here.
"""

import logging
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from hlat.data.prepare.work_units import WorkUnit, write_tokenized_unit
from hlat.data.stores.local_files import convert_disk_errors
from hlat.data.tokenizers.load import load_saved
from hlat.runtime.errors import DataError
from hlat.runtime.helper_process import SINGLE_THREAD, Channel, HelperProcess, PeerEnded, start_program
from hlat.runtime.process import is_stopped
from hlat.runtime.progress import ProgressRecord

_LOG = logging.getLogger(__name__)  # a warning is a line on stderr
_PATIENCE = 60.0  # seconds after which a process that does not compute is told


class WorkerPool:
    """Up to ``count`` processes that tokenize units; a context manager that leaves none behind."""

    def __init__(self, count: int, tokenizer: Path, folder: Path, dtype: str) -> None:
        self._count = count
        self._folder = folder
        self._settings = tokenizer, folder, dtype
        self._tasks: queue.Queue[WorkUnit | None] = queue.Queue()  # None ends a thread
        self._results: queue.Queue[int | BaseException] = queue.Queue()
        self._processes: list[HelperProcess] = []
        self._threads: list[threading.Thread] = []
        self._idle = set[tuple[int, float]]()  # units, as in _working, whose process did not compute at the last look
        # by process id: its process, unit and when that was sent; until told
        self._working: dict[int, tuple[HelperProcess, str, float]] = {}

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in self._threads:
            self._tasks.put(None)
        for process in self._processes:
            process.kill()  # unfinished units are discarded; finished ones are on disk
        for thread in self._threads:
            thread.join()
        for half_written in self._folder.glob("*.tmp"):  # left by killed processes: a full disk needs the space
            half_written.unlink()

    def run(self, units: Iterator[WorkUnit]) -> Iterator[int]:
        """Yield the number of each unit once its files are on disk, in any order.

        DataError if a unit cannot be tokenized or a worker was killed, StorageError of the disk.
        """
        waiting = 0
        for unit in units:
            # A process is started only when all others have work: a small corpus needs few.
            if waiting == len(self._processes) < self._count:
                self._start()
            self._tasks.put(unit)
            waiting += 1
            # Twice the workers: each has a unit to go on with, and memory is bounded.
            while waiting > 2 * self._count or (waiting and not self._results.empty()):
                yield self._next()
                waiting -= 1
        for _ in range(waiting):
            yield self._next()

    def _next(self) -> int:
        while True:
            self._tell_waits()
            with suppress(queue.Empty):
                result = self._results.get(timeout=_PATIENCE / 4)
                if isinstance(result, BaseException):
                    raise result
                return result

    def _tell_waits(self) -> None:
        """Warn once of each unit whose process has not answered for long, unless it computes."""
        for pid, (process, where, begin) in list(self._working.items()):
            seconds = time.monotonic() - begin
            if seconds <= _PATIENCE:
                continue
            if is_stopped(pid):
                what = f"it is stopped, and `kill -CONT {pid}` continues it"
            elif ProgressRecord.waits_for_disk(pid):
                what = "it waits for a disk"
            elif sys.platform == "linux" and process.silence(begin):  # others do not tell a state
                what = "it does not compute"
                if (pid, begin) not in self._idle:  # it may have been between two computations
                    self._idle.add((pid, begin))
                    continue
            else:
                self._idle.discard((pid, begin))
                continue
            self._working.pop(pid, None)
            told = "%s: tokenizing process %d has not answered for %.0f s: %s; still waiting"
            _LOG.warning(told, where, pid, seconds, what)

    def _start(self) -> None:
        process = start_program(
            f"{__name__}:serve", *self._settings, name="a tokenizing process", environment=SINGLE_THREAD
        )
        self._processes.append(process)
        thread = threading.Thread(target=self._serve, args=(process,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, process: HelperProcess) -> None:
        """Send units from the queue to one process, and collect its replies, until the queue yields None."""
        while (unit := self._tasks.get()) is not None:
            self._working[process.pid] = process, unit.where, time.monotonic()
            try:
                process.send(unit)
                self._results.put(process.receive())
            except PeerEnded as end:
                remedy = "Run again, with fewer data.workers if it happens again; finished work is kept."
                self._results.put(DataError(f"{unit.where}: {end}, perhaps because memory ran out. {remedy}"))
            except BaseException as error:  # of any kind: the main thread waits for a result of each unit
                self._results.put(error)
            self._working.pop(process.pid, None)


def serve(channel: Channel, tokenizer_folder: Path, folder: Path, dtype: str) -> None:
    """Tokenize the units of one parent into its staging folder."""
    tokenizer = load_saved(tokenizer_folder)
    while True:
        unit, _ = channel.receive()
        try:
            with convert_disk_errors(folder):
                write_tokenized_unit(unit, tokenizer, folder, dtype)
        except DataError as error:
            raise DataError(f"{unit.where}: {error}") from error
        except Exception as error:
            error.add_note(unit.where)  # for the traceback of a bug
            raise
        channel.send(unit.span.number)
