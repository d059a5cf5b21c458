"""Worker processes and their pool: work units in, numbers of finished units out, a bounded number of units in flight.

    WorkerPool --(a line of JSON, then the documents)--> worker --(unit files)--> staging folder
               <----------------- {"done": 17} or {"error": ...} ------------

A worker is started as a separate program (``python -m hlat.data.prepare.worker``) instead of forked, because the parent
may have threads of torch. It reads from stdin and writes lines of JSON to stdout. It ends when its stdin is closed, so
it never outlives the parent. It imports this module, so no torch here.
"""

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from hlat.data.documents import SplitRule
from hlat.data.prepare.work_units import UnitSpan, WorkUnit, write_tokenized_unit
from hlat.data.stores.local_files import is_disk_error, unwritable_folder_error
from hlat.data.tokenizers.load import load_saved
from hlat.runtime.errors import DataError
from hlat.runtime.process import is_stopped
from hlat.runtime.progress import ProgressRecord

_LOG = logging.getLogger(__name__)  # a warning is a line on stderr
_PATIENCE = 60.0  # seconds after which a process that does not compute is told


class WorkerPool:
    """Up to ``count`` processes that tokenize units; a context manager that leaves none behind."""

    def __init__(self, count: int, tokenizer: Path, folder: Path, dtype: str) -> None:
        self._count = count
        self._folder = folder
        self._settings = {"tokenizer": str(tokenizer), "folder": str(folder), "dtype": dtype}
        self._tasks: queue.Queue[WorkUnit | None] = queue.Queue()  # None ends a thread
        self._results: queue.Queue[int | BaseException] = queue.Queue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._idle = set[tuple[int, float]]()  # units, as in _working, whose process did not compute at the last look
        self._working: dict[int, tuple[str, float]] = {}  # by process: its unit and when that was sent; until told
        self._no_progress = ProgressRecord(memoryview(bytearray(ProgressRecord.BYTES)))  # knows states of processes

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
        for process in self._processes:
            process.wait()
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
        for pid, (where, begin) in list(self._working.items()):
            seconds = time.monotonic() - begin
            if seconds <= _PATIENCE:
                continue
            if is_stopped(pid):
                what = f"it is stopped, and `kill -CONT {pid}` continues it"
            elif ProgressRecord.waits_for_disk(pid):
                what = "it waits for a disk"
            elif sys.platform == "linux" and self._no_progress.silence(begin, pid):  # others do not tell a state
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
        single_thread = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hlat.data.prepare.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **single_thread},
            start_new_session=True,  # Ctrl-C must reach only the parent, which ends its workers itself
        )
        self._processes.append(process)
        thread = threading.Thread(target=self._serve, args=(process,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, process: "subprocess.Popen[bytes]") -> None:
        """Send units from the queue to one process, and collect its replies, until the queue yields None."""
        assert process.stdin is not None
        assert process.stdout is not None
        where = "start-up"
        try:
            process.stdin.write(json.dumps(self._settings).encode() + b"\n")
            while (unit := self._tasks.get()) is not None:
                where = unit.where
                self._working[process.pid] = where, time.monotonic()
                write_unit(process.stdin, unit)
                reply = process.stdout.readline()
                self._working.pop(process.pid, None)
                self._results.put(self._outcome(reply, unit, process))
        except BrokenPipeError:
            self._results.put(_worker_ended(process, where))
        except BaseException as error:  # of any kind: the main thread waits for a result of each unit
            self._results.put(error)
        finally:
            process.stdout.close()
            with suppress(OSError):  # the process that would read the rest of the buffer has ended
                process.stdin.close()

    def _outcome(self, line: bytes, unit: WorkUnit, process: "subprocess.Popen[bytes]") -> int | Exception:
        """Return the number of the finished unit from a worker's reply, or the error to raise."""
        if not line:  # the process has ended: it was killed
            return _worker_ended(process, unit.where)
        reply = json.loads(line)
        if "done" in reply:
            return int(reply["done"])
        message = reply["error"]["message"]
        match reply["error"]["kind"]:
            case "data":
                return DataError(f"{unit.where}: {message}")
            case "storage":
                return unwritable_folder_error(self._folder, message)
        return RuntimeError(f"a tokenizing process failed on {unit.where}:\n{message}")


def _worker_ended(process: "subprocess.Popen[bytes]", where: str) -> DataError:
    code = process.wait()
    cause = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return DataError(
        f"{where}: a tokenizing process {cause}, perhaps because memory ran out. Run again, "
        "with fewer data.workers if it happens again; finished work is kept."
    )


def write_unit(stream: IO[bytes], unit: WorkUnit) -> None:
    """Send a unit: a line of JSON with the sizes of its documents, then their bytes."""
    span, split_rule = unit.span, unit.split_rule
    header = {
        "span": span.to_json(),
        "split_rule": vars(split_rule),
        "where": unit.where,
        "are_tokens": unit.are_tokens,
        "sizes": [len(document) for document in unit.documents],
    }
    stream.write(json.dumps(header).encode() + b"\n")
    for document in unit.documents:
        stream.write(document)
    stream.flush()


def read_unit(stream: IO[bytes]) -> WorkUnit | None:
    """Receive a unit; None at the end of the stream, also in the middle of a unit."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    header = json.loads(line)
    documents = [stream.read(size) for size in header["sizes"]]
    if [len(document) for document in documents] != header["sizes"]:
        return None
    span, split_rule = UnitSpan.from_json(header["span"]), SplitRule(**header["split_rule"])
    return WorkUnit(span, split_rule, documents, header["are_tokens"], header["where"])


def main() -> None:
    """Serve one parent, whose first line is JSON: {"tokenizer": folder, "folder": staging, "dtype": name}."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output printed by a library must not be mistaken for a reply
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the parent was interrupted or killed: end without a word
        return
    settings = json.loads(line)
    tokenizer = load_saved(Path(settings["tokenizer"]))
    units: queue.Queue[WorkUnit] = queue.Queue(maxsize=1)  # the next unit is received while one is tokenized
    threading.Thread(target=_receive, args=(sys.stdin.buffer, units), daemon=True).start()
    while True:
        unit = units.get()
        reply: dict[str, Any]
        try:
            write_tokenized_unit(unit, tokenizer, Path(settings["folder"]), settings["dtype"])
            reply = {"done": unit.span.number}
        except Exception as error:
            reply = {"error": _describe(error)}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _receive(stream: IO[bytes], units: "queue.Queue[WorkUnit]") -> None:
    while (unit := read_unit(stream)) is not None:
        units.put(unit)
    os._exit(0)  # at once, even in the middle of a unit: the parent no longer waits for it


def _describe(error: Exception) -> dict[str, str]:
    """Return the kind and message from which the parent raises the same error."""
    if isinstance(error, OSError) and is_disk_error(error.errno):
        return {"kind": "storage", "message": os.strerror(error.errno or 0)}
    if type(error).__name__ == "DataError":
        return {"kind": "data", "message": str(error)}
    return {"kind": "bug", "message": "".join(traceback.format_exception(error))}


if __name__ == "__main__":
    main()
