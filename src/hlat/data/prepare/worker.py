"""Worker processes and their pool: work units in, numbers of finished units out, a bounded number of units in flight.

    WorkerPool --WorkUnit--> helper process --(unit files)--> staging folder
               <--- its number, or an error ---

A worker is a new interpreter instead of a fork, because the parent may have threads of torch. It imports this module,
so no torch here.
"""

import logging
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue

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
        self._threads = ThreadPoolExecutor(count)  # each waits for a process
        self._processes: list[HelperProcess] = []
        self._free: SimpleQueue[HelperProcess] = SimpleQueue()
        self._idle = set[tuple[int, float]]()  # units, as in _working, whose process did not compute at the last look
        # by process id: its process, unit and when that was sent; until told
        self._working: dict[int, tuple[HelperProcess, str, float]] = {}

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()  # unfinished units are discarded; finished ones are on disk
        self._threads.shutdown()
        for half_written in self._folder.glob("*.tmp"):  # left by killed processes: a full disk needs the space
            half_written.unlink()

    def run(self, units: Iterator[WorkUnit]) -> Iterator[int]:
        """Yield the number of each unit once its files are on disk, in any order.

        DataError if a unit cannot be tokenized or a worker was killed, StorageError of the disk.
        """
        waiting = set[Future[int]]()
        for unit in units:
            # A process is started only when all others have work: a small corpus needs few.
            if len(waiting) == len(self._processes) < self._count:
                self._start()
            waiting.add(self._threads.submit(self._tokenize, unit))
            # Twice the workers: each has a unit to go on with, and memory is bounded.
            while len(waiting) > 2 * self._count or any(each.done() for each in waiting):
                yield self._next(waiting)
        while waiting:
            yield self._next(waiting)

    def _next(self, waiting: set[Future[int]]) -> int:
        while True:
            self._tell_waits()
            for finished in wait(waiting, _PATIENCE / 4, FIRST_COMPLETED).done:
                waiting.remove(finished)
                return finished.result()

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
        self._free.put(process)

    def _tokenize(self, unit: WorkUnit) -> int:
        """Have a free process tokenize a unit; return its number."""
        process = self._free.get()
        self._working[process.pid] = process, unit.where, time.monotonic()
        try:
            process.send(unit)
            return int(process.receive())
        except PeerEnded as end:
            remedy = "Run again, with fewer data.workers if it happens again; finished work is kept."
            raise DataError(f"{unit.where}: {end}, perhaps because memory ran out. {remedy}") from None
        finally:
            self._working.pop(process.pid, None)
            self._free.put(process)


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
