"""Heartbeats: the present activity of each rank, in a small memory-mapped file for the supervisor; and its stacks.

    main thread     --phases, steps, progress--> rank-00000 (mapped) --read_heartbeat--> HeartbeatReading
    sampling thread --alive, waiting, location->                             --> watchdog, straggler detector, goodput
      20 times a second: stack of the main thread --> does it wait for another rank? its innermost location in hlat
    supervisor --SIGUSR2--> faulthandler in each rank --> rank-00000.stacks --read_stacks--> its report of a hang

A rank writes to mapped memory, which takes microseconds and never blocks. The file stays readable when the rank hangs
or has been killed. Times are seconds of the monotonic clock, which all processes of a machine share. Without
HLAT_BEATS, the folder of these files, nothing is written.

A slow rank works while the others wait for it; a hanging rank is the one that does not wait. While a process is
stopped, or a call holds the GIL, no samples are taken and ``alive_at`` stays. Stack dumps work even then. faulthandler
says nothing when it has finished. It writes the main thread last, outermost frame at the end: each rank records that
frame when it starts, and a dump that ends with it is whole.
"""

import ctypes
import faulthandler
import math
import mmap
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from types import FrameType
from typing import IO, Any

from hlat.runtime.progress import PHASES, ProgressRecord, current_phase, observe_phases, record_progress_in

HEARTBEAT_FOLDER = "HLAT_BEATS"  # environment variable that names the folder of heartbeat files

PRODUCTIVE = ("forward", "backward", "reduce", "optimizer", "device", "evaluation", "between")
"""Phases in which training makes progress; in the others it saves, or waits for data."""

_LOCATION_BYTES = 256
_READ_ATTEMPTS = 5
_RUN_ID_FILE = "run"
_IN_MEMORY = Path("/dev/shm")


class _Content(ctypes.Structure):
    """Content of a heartbeat file; see ``HeartbeatReading``. Numbers are float64, -1 or 0 if they are not known."""

    version: float  # odd while a phase is being recorded
    pid: float
    step: float
    phase: float  # index in PHASES
    since: float
    start_step: float
    first_step_at: float
    durable_step: float
    durable_seconds: float
    saver: float
    saves: float
    progress_at: float  # this and the next one: a ``ProgressRecord``
    blocked: float
    alive_at: float  # this and the next one: written by the sampling thread
    waiting: float


_TABLES = ("seconds", "longest", "busy", "waited")  # a number for each phase
_Content._fields_ = [
    *((name, ctypes.c_double) for name in _Content.__annotations__),
    *((name, ctypes.c_double * len(PHASES)) for name in _TABLES),
    ("location", ctypes.c_char * _LOCATION_BYTES),
]


def heartbeat_path(folder: Path, rank: int) -> Path:
    """Path of a rank's heartbeat file in the folder of heartbeats."""
    return folder / f"rank-{rank:05d}"


def _saver_path(beat: Path) -> Path:
    return beat.with_name(f"saver-of-{beat.name}")


@dataclass(frozen=True)
class HeartbeatReading:
    """Activity of a rank when its heartbeat was read; times in seconds of the monotonic clock."""

    rank: int
    pid: int
    step: int  # optimizer steps done in the whole run
    phase: str
    since: float  # time when the phase began
    start_step: int | None  # step that this process started from; None before its first step
    first_step_at: float | None
    durable_step: int | None  # newest step that this process knows to be durable
    durable_seconds: float  # productive seconds of this process up to that step
    alive_at: float  # time when the sampling thread last ran
    waiting: bool  # True if it waits for another rank
    location: str  # innermost stack frame in hlat
    saver: int | None  # process id of its saver process
    saves: int  # states that this process has seen become durable
    progress_at: float  # time when slow work of a phase last advanced, such as a save
    blocked: bool  # True if a call waits for the system: a disk or a server
    seconds: dict[str, float]  # by phase: seconds since the first step
    longest: dict[str, float]  # by phase: seconds of the longest that has ended; none for a phase that never ended
    busy: dict[str, float]  # by phase: seconds, sampled, in which it did not wait for another rank

    def aged(self, now: float) -> "HeartbeatReading":
        """Return the reading with its times counted from ``now``; with a negative ``now``, undo that."""
        first = None if self.first_step_at is None else self.first_step_at - now
        times = {name: getattr(self, name) - now for name in ("since", "alive_at", "progress_at")}
        return replace(self, first_step_at=first, **times)

    def is_advancing(self, now: float, seconds: float) -> bool:
        """True if its slow work has advanced within ``seconds``, or waits for a disk or a server."""
        limit = max(seconds, ProgressRecord.BLOCKED_LIMIT) if self.blocked else seconds
        return now - self.progress_at <= limit

    @property
    def waits_for_others(self) -> bool:
        # In phase data a thread may wait, for the reader of its batch on another rank.
        return self.waiting or self.phase == "data"

    @property
    def productive(self) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in PRODUCTIVE)

    @property
    def current_step(self) -> int:
        # Counted from 1; a phase of a step belongs to the one that is not done yet.
        return self.step + (self.phase in ("data", "forward", "backward", "reduce", "optimizer"))


class Heartbeat:
    """Heartbeat of this rank, a phase observer; only the main thread may call it. OSError without a file."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self.folder, self.saver_path = clock, path.parent, _saver_path(path)
        self._step: Callable[[], int] = lambda: 0
        self._productive_by_step: dict[int, float] = {}  # productive seconds at each step that is being saved
        with path.open("w+b") as file:
            file.truncate(ctypes.sizeof(_Content))
            mapped = mmap.mmap(file.fileno(), ctypes.sizeof(_Content))
        self.content: Any = _Content.from_buffer(mapped)
        self._first_step_begun = False
        self.content.start_step = self.content.durable_step = -1
        self.content.phase, self.content.since, self.content.alive_at = PHASES.index(current_phase()), clock(), clock()
        self.content.pid = os.getpid()  # last: without it the file is not complete
        begin: int = _Content.progress_at.offset  # type: ignore[attr-defined]  # a descriptor of the structure
        # In the file, so that the supervisor reads it too.
        self.progress = ProgressRecord(memoryview(mapped)[begin : begin + ProgressRecord.BYTES], clock)

    def set_step_counter(self, counter: Callable[[], int]) -> None:
        self._step = counter

    def __call__(self, phase: str) -> None:
        """End the current phase and begin another."""
        at, now = self.content, self._clock()
        at.version += 1  # odd: a reader tries again
        before, duration = int(at.phase), now - at.since
        at.seconds[before] += duration
        at.longest[before] = max(at.longest[before], duration)
        at.phase, at.since, at.step = PHASES.index(phase), now, self._step()
        if phase == "data" and not self._first_step_begun:
            self._begin_first_step(now)
        # A background save is durable later: the seconds up to its step are kept until then.
        if phase == "checkpoint":
            self._productive_by_step[self._step()] = self._productive()
        at.version += 1

    def record_durable_step(self, step: int) -> None:
        seconds = self._productive_by_step.get(step, self._productive())
        self._productive_by_step = {later: value for later, value in self._productive_by_step.items() if later > step}
        self.content.durable_seconds, self.content.durable_step = seconds, step
        self.content.saves += 1

    def record_sample(self, waiting: bool, location: str, seconds: float) -> None:
        """Record a sample of the main thread, taken ``seconds`` after the last one; called by the sampling thread."""
        at = self.content
        (at.waited if waiting else at.busy)[int(at.phase)] += seconds
        at.location = location.encode()[-_LOCATION_BYTES:]
        at.waiting, at.alive_at = waiting, self._clock()

    def _begin_first_step(self, now: float) -> None:
        self._first_step_begun = True
        # What came before the first step is startup, not seconds of phases.
        for table in (self.content.seconds, self.content.longest):
            table[:] = [0.0] * len(PHASES)
        self.content.start_step, self.content.first_step_at = self._step(), now

    def _productive(self) -> float:
        return sum(float(self.content.seconds[PHASES.index(phase)]) for phase in PRODUCTIVE)


_heartbeat: Heartbeat | None = None


def heartbeat_root() -> Path | None:
    """Return the folder for heartbeats, in memory, because a disk may be busy; None if that is not available."""
    return _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None


@contextmanager
def running_heartbeat(rank: int, folder: Path | None = None) -> Iterator[Heartbeat | None]:
    """Write this process's heartbeat inside the block; None without a supervisor, because nobody reads it."""
    global _heartbeat  # noqa: PLW0603  (a process has one heartbeat)
    named = os.environ.get(HEARTBEAT_FOLDER)
    if folder is None and named is not None and Path(named).is_dir():  # else the supervisor has ended
        folder = Path(named)
    if folder is None:
        yield None
        return
    with dump_stacks_on_signal(stacks_path(folder, rank)):
        _heartbeat = Heartbeat(heartbeat_path(folder, rank))
        record_progress_in(_heartbeat.progress)
        try:
            with observe_phases(_heartbeat), sample_main_thread(_heartbeat):
                yield _heartbeat
        finally:
            record_progress_in(None)
            _heartbeat = None


def set_step_counter(counter: Callable[[], int]) -> None:
    """Set the function that counts the steps done, in this process's heartbeat if it has one."""
    if _heartbeat is not None:
        _heartbeat.set_step_counter(counter)


def record_durable_step(step: int) -> None:
    """Record in the heartbeat that the state of a step is durable."""
    if _heartbeat is not None:
        _heartbeat.record_durable_step(step)


def reset_durable_step(step: int | None) -> None:
    """Record in the heartbeat an earlier durable step, or None: newer states are damaged."""
    if _heartbeat is not None:
        _heartbeat.content.durable_step = -1 if step is None else step


def record_run_id(run_id: str) -> None:
    """Record the run id in the heartbeat folder, for the supervisor."""
    if _heartbeat is not None:
        with suppress(OSError):  # the supervisor has ended, and its folder is gone
            (_heartbeat.folder / _RUN_ID_FILE).write_text(run_id)


def record_saver(pid: int) -> None:
    """Record in the heartbeat the saver process of this rank, which may outlive it for a while."""
    if _heartbeat is not None:
        _heartbeat.content.saver = pid


def open_saver_progress() -> IO[bytes] | None:
    """Open the file for the progress of this rank's saver, which the supervisor reads; None if nobody does."""
    if _heartbeat is None:
        return None
    return _heartbeat.saver_path.open("w+b")


def read_saver_silence(folder: Path, beat: HeartbeatReading) -> float:
    """Seconds without a sign of life of a rank's saver; infinite if it leaves none."""
    with suppress(OSError), _saver_path(heartbeat_path(folder, beat.rank)).open("r+b") as file:
        return ProgressRecord.in_file(file).silence(0.0, beat.saver)
    return math.inf


def read_heartbeat_run_id(folder: Path) -> str | None:
    """Run id of a heartbeat folder; None if it was not recorded yet."""
    with suppress(FileNotFoundError):
        return (folder / _RUN_ID_FILE).read_text() or None
    return None


def read_heartbeat(folder: Path, rank: int) -> HeartbeatReading | None:
    """Read the heartbeat of a rank; None if it has not written one yet."""
    for _ in range(_READ_ATTEMPTS):  # odd version: being written; a rank killed while writing is read as it is
        try:
            content = heartbeat_path(folder, rank).read_bytes()
        except FileNotFoundError:
            return None
        if len(content) != ctypes.sizeof(_Content):
            return None
        read = _Content.from_buffer_copy(content)
        if read.version % 2 == 0:
            break
    return _reading(rank, read) if read.pid else None


def _reading(rank: int, at: Any) -> HeartbeatReading:
    return HeartbeatReading(
        rank=rank,
        pid=int(at.pid),
        step=int(at.step),
        phase=PHASES[int(at.phase)],
        since=at.since,
        start_step=int(at.start_step) if at.start_step >= 0 else None,
        first_step_at=at.first_step_at or None,
        durable_step=int(at.durable_step) if at.durable_step >= 0 else None,
        durable_seconds=at.durable_seconds,
        alive_at=at.alive_at,
        waiting=bool(at.waiting),
        saver=int(at.saver) or None,
        saves=int(at.saves),
        progress_at=at.progress_at,
        blocked=at.blocked > 0,
        location=at.location.decode(errors="replace"),
        seconds=_by_phase(at.seconds),
        longest=_by_phase(at.longest),
        busy=_by_phase(at.busy),
    )


def _by_phase(table: Iterable[float]) -> dict[str, float]:
    return {phase: value for phase, value in zip(PHASES, table, strict=True) if value > 0}


_SAMPLE_SECONDS = 0.05
_WAITING_FILE = "hlat/runtime/distributed/host_collectives.py"  # its functions wait for other ranks


@contextmanager
def sample_main_thread(observer: Heartbeat) -> Iterator[None]:
    """Inside the block, take a sample every 50 ms in a thread."""
    stop = threading.Event()
    thread = threading.Thread(target=_sample_until, args=(observer, stop), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _sample_until(observer: Heartbeat, stop: threading.Event) -> None:
    main = threading.main_thread().ident
    assert main is not None, "the main thread runs"
    last = time.monotonic()
    while not stop.wait(_SAMPLE_SECONDS):
        frame = sys._current_frames().get(main)
        now = time.monotonic()
        observer.record_sample(
            frame is not None and is_waiting(frame), "" if frame is None else find_location(frame), now - last
        )
        del frame  # a reference would keep the frame's tensors alive
        last = now


def is_waiting(frame: FrameType) -> bool:
    """True if the innermost code of a stack waits for other ranks: in a collective, a message or a vote."""
    # Inside Python's threading, the caller decides.
    while frame.f_code.co_filename == threading.__file__ and frame.f_back is not None:
        frame = frame.f_back
    file = PurePath(frame.f_code.co_filename).as_posix()
    if "/torch/distributed/" in file:
        return "/torch/distributed/tensor/" not in file  # DTensor, which computes
    return file.endswith(_WAITING_FILE)


def find_location(frame: FrameType) -> str:
    """Innermost frame in hlat, as ``training/loop.py:52 update``; empty if there is none."""
    innermost: FrameType | None = frame
    while innermost is not None:
        file = PurePath(innermost.f_code.co_filename).as_posix()
        if "/hlat/" in file and not file.endswith(_WAITING_FILE):
            return f"{file.rpartition('/hlat/')[2]}:{innermost.f_lineno} {innermost.f_code.co_name}"
        innermost = innermost.f_back
    return ""


# Signal on which a rank dumps its stacks; sent to its main thread, it shows where that was stopped.
STACKS_SIGNAL = signal.SIGUSR2

# The last line of a stack of more than 100 frames. If another thread's is as deep, the main thread's may be missed.
_CUT_STACK = "  ..."


def stacks_path(folder: Path, rank: int) -> Path:
    """Path of a rank's stack dumps in the folder of heartbeats."""
    return folder / f"rank-{rank:05d}.stacks"


def _outermost_path(path: Path) -> Path:
    return path.with_suffix(".outermost")


@contextmanager
def dump_stacks_on_signal(path: Path) -> Iterator[None]:
    """Inside the block, dump all threads' stacks at every ``STACKS_SIGNAL``. For the main thread; OSError."""
    outermost = _outermost_path(path)
    # The outermost frame of the main thread, which stays the same: a dump that ends with it is whole.
    with outermost.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=False)
    outermost.write_text(outermost.read_text(errors="replace").splitlines()[-1])
    with path.open("w") as file:
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(STACKS_SIGNAL)


def read_stacks(folder: Path, rank: int) -> str:
    """A rank's stack dumps as far as they are written, from the folder of heartbeats."""
    return _read_or_empty(stacks_path(folder, rank))


def has_stacks(folder: Path, rank: int) -> bool:
    """True if a rank has completely written its stacks to the folder of heartbeats."""
    path = stacks_path(folder, rank)
    outermost = _read_or_empty(_outermost_path(path))
    last = _read_or_empty(path).rpartition("\n")[0].rpartition("\n")[2]  # a line without its end may be half of one
    return outermost != "" and (_without_line_number(last) == _without_line_number(outermost) or last == _CUT_STACK)


def main_thread_stack(stacks: str) -> str:
    """The main thread's stack of a dump; faulthandler writes it last."""
    return stacks.strip().rpartition("\n\n")[2]


def _without_line_number(line: str) -> str:
    # The outermost frame goes on, too.
    return re.sub(r", line \d+ in ", " in ", line)


def _read_or_empty(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
