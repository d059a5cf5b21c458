"""Work of this process at a moment: stage of the start, phase of the step, progress that another process can read.

    enter_stage: importing, preparing data, building the model, ... --> displays
    enter_phase: data -> forward <-> backward -> reduce -> optimizer -> saving? checkpoint? evaluation? -> data ...
                     --> phase timer, heartbeats, fault injection: at every change, on the thread that computes

    bytes written, request answered --advance--------> ProgressRecord --silence--> the process that waits for this one
    waiting for a disk or a server  --blocking_call-->

Beginning a stage or a phase ends the one before. A slow disk and a dead process look alike from outside: nothing
happens. The record, in shared memory, tells them apart. A process inside ``blocking_call`` waits for the system, which
may take minutes. One that neither advances nor waits for it hangs.
"""

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, ClassVar

from hlat.runtime.process import is_running, process_state

Observer = Callable[[str], None]
"""Called with the name of a stage or a phase that begins."""

_stage_observers: list[Observer] = []


def enter_stage(name: str) -> None:
    """Begin a part of the start, which ends the one before; the empty name ends the start."""
    for observer in list(_stage_observers):
        observer(name)


def observe_stages(observer: Observer) -> AbstractContextManager[None]:
    """Call an observer with each stage that begins within the block."""
    return _added(_stage_observers, observer)


@contextmanager
def _added(observers: list[Observer], observer: Observer) -> Iterator[None]:
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


PHASES = (
    "start",
    "data",
    "forward",
    "backward",
    "reduce",
    "optimizer",
    "device",
    "evaluation",
    "saving",
    "checkpoint",
    "between",
    "end",
)
"""Names of the phases.

``start``: until the first step; ``device``: waiting for launched kernels; ``saving``: waiting for a save that another
process writes; ``between``: the rest of a step.
"""

_current_phase = PHASES[0]
_phase_observers: list[Observer] = []


def current_phase() -> str:
    """Return the phase of ``PHASES`` that this process is in."""
    return _current_phase


def enter_phase(name: str) -> None:
    """Begin a phase; no effect if it is the current one."""
    global _current_phase  # noqa: PLW0603  (one phase per process)
    assert name in PHASES, name
    if name == _current_phase:
        return
    _current_phase = name
    for observer in _phase_observers:
        observer(name)


def observe_phases(observer: Observer) -> AbstractContextManager[None]:
    """Call an observer with each phase that begins within the block."""
    return _added(_phase_observers, observer)


class ProgressRecord:
    """Time of the last progress of a process, and how many of its calls wait for the system."""

    BYTES: ClassVar = 16
    """Size of a record: two float64 numbers."""

    BLOCKED_LIMIT: ClassVar = 1800.0
    """Seconds that a single call may wait for the system before it counts as a hang."""

    def __init__(self, memory: memoryview, clock: Callable[[], float] = time.monotonic) -> None:
        # Shared memory if another process reads it; monotonic seconds, the same for all processes of a machine.
        self._numbers, self._clock = memory.cast("d"), clock
        self._lock = threading.Lock()  # uploads run on several threads

    @staticmethod
    def open_file() -> IO[bytes]:
        # In memory if the system can: temporary folders may be full.
        if hasattr(os, "memfd_create"):
            return os.fdopen(os.memfd_create("progress"), "w+b")
        return tempfile.TemporaryFile()

    @classmethod
    def in_file(cls, file: IO[bytes]) -> "ProgressRecord":
        if os.fstat(file.fileno()).st_size < cls.BYTES:
            file.truncate(cls.BYTES)
            if hasattr(os, "posix_fallocate"):  # without space, a store to the mapped file would kill this process
                os.posix_fallocate(file.fileno(), 0, cls.BYTES)
        return cls(memoryview(mmap.mmap(file.fileno(), cls.BYTES)))

    @classmethod
    def starting(cls, file: IO[bytes]) -> "ProgressRecord":
        """Return the record of a process that is about to start and takes it over (``begin_progress``)."""
        record = cls.in_file(file)
        # A program and its libraries are hundreds of files: until then it counts as waiting for its disk.
        record.begin_blocking()
        return record

    def advance(self) -> None:
        self._numbers[0] = self._clock()

    def begin_blocking(self) -> None:
        with self._lock:
            self._numbers[1] += 1
        self.advance()

    def end_blocking(self) -> None:
        with self._lock:
            self._numbers[1] -= 1
        self.advance()

    def silence(self, since: float, pid: int | None = None) -> float:
        """Return the seconds without a sign of life after ``since``; 0 while a call waits for the system."""
        at = max(since, self._numbers[0])
        # A process that is stopped or has ended is silent. One that computes, or waits for a processor, is not: a busy
        # machine may give it none for long.
        seconds, state = self._clock() - at, process_state(pid) if pid is not None else ""
        is_silent = state in ("T", "t") or (pid is not None and not is_running(pid))
        is_busy = (self._numbers[1] > 0 and not is_silent) or state in ("R", "D")
        return 0.0 if is_busy and seconds < self.BLOCKED_LIMIT else seconds

    @staticmethod
    def waits_for_disk(thread: int) -> bool:
        """Return True if a thread waits in the kernel, as for a page of a file that is mapped."""
        return process_state(thread) == "D"

    @staticmethod
    def silence_here() -> float:
        """Return the seconds since this process's last sign of life; 0 if it has no record."""
        return 0.0 if _own_record is None else _own_record.silence(0.0)

    @property
    def blocked_seconds(self) -> float:
        """Seconds that a call has been waiting for the system; 0 if none does."""
        return self._clock() - self._numbers[0] if self._numbers[1] > 0 else 0.0


_own_record: ProgressRecord | None = None


def record_progress_in(record: ProgressRecord | None) -> None:
    """Set the record of this process; None for no record."""
    global _own_record  # noqa: PLW0603  (one record per process)
    _own_record = record


def begin_progress(descriptor: int) -> None:
    """Take over the record that the parent has made by ``starting`` in an open file, which is closed."""
    with open(descriptor, "r+b") as file:
        record = ProgressRecord.in_file(file)
    record_progress_in(record)
    record.end_blocking()


def advance() -> None:
    """Record that the work of this process has progressed."""
    if _own_record is not None:
        _own_record.advance()


@contextmanager
def blocking_call() -> Iterator[None]:
    """Record that this process waits for the system within the block: a disk, a server, memory, a pause."""
    record = _own_record
    if record is None:
        yield
        return
    record.begin_blocking()
    try:
        yield
    finally:
        record.end_blocking()


def machine_clock() -> float:
    """Seconds of a monotonic clock that all processes of this machine share; its zero has no meaning."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)  # on Linux it also advances while the machine sleeps
    return time.monotonic() if boot is None else time.clock_gettime(boot)
