"""Waiting for the processes of a run, and passing on what it is asked.

    signals --Stops--> processes (once each)          processes --watch--> how each ended, in the order of ranks

A process that fails takes the others with it, since they wait for it. Most notice by themselves within milliseconds
and report what they saw, so they are given a moment to. A run that was asked to stop is given all the time that it
needs to save.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from torch.distributed.elastic.multiprocessing import SubprocessContext

from hlat.launch.report import Report, read_report

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # what ``hlat train`` saves and stops on
_STOPPED = tuple(128 + number for number in _STOPPING)  # what it then ends with

_POLL = 0.05
_NOTICING = 3.0  # seconds in which the others notice by themselves that one has failed
_ENDING = 30.0  # seconds in which a process that is told to end does so; elastic's own patience


@dataclass(frozen=True)
class End:
    """How one process ended."""

    rank: int
    code: int  # exit code, or minus the signal that ended it, as subprocess has it
    report: Report | None
    noticed: float  # seconds since the epoch
    was_told: bool  # whether we had sent it the signal that ended it

    @property
    def failed(self) -> bool:
        """Whether it did not come to an end of its own, or saved and stopped."""
        return self.code != 0 and (self.report is not None or self.code not in _STOPPED)


class Stops:
    """Context in which SIGINT, SIGTERM and SIGHUP, unless ignored here, are kept for ``watch`` to pass on.

    They may arrive before there are processes to pass them to. Outside the main thread, where Python delivers no
    signals, nothing is changed.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[signal.Signals, signal.Handlers | Callable[..., object] | int | None] = {}

    def __enter__(self) -> "Stops":
        if threading.current_thread() is threading.main_thread():
            # What was ignored stays so, here and in the processes: nohup ignores SIGHUP, a background job SIGINT.
            heard = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._receive) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


def watch(context: SubprocessContext, stops: Stops) -> list[End]:
    """Wait until all processes have ended.

    Args:
        context: the processes, as elastic started them.
        stops: what asks the run to stop.

    Returns:
        One ``End`` per process, in the order of ranks.
    """
    watched = _Watched(context)
    passed_on = 0
    hurried: float | None = None  # since when the end has been waited for with impatience; monotonic seconds
    while watched.running:
        watched.look()
        for number in stops.received[passed_on:]:
            watched.send(number)
            passed_on += 1
        failed = any(end.failed for end in watched.ends.values())
        if hurried is None and (failed or passed_on > 1):
            hurried = time.monotonic()
        waited = 0.0 if hurried is None else time.monotonic() - hurried
        if failed and not watched.told and waited > _NOTICING:
            watched.send(signal.SIGTERM)
        if waited > _ENDING or passed_on > 2:
            watched.kill()
        if watched.running:
            time.sleep(_POLL)
    return [watched.ends[rank] for rank in sorted(watched.ends)]


class _Watched:
    """The processes: which still run, how the others ended, and what they were sent."""

    def __init__(self, context: SubprocessContext) -> None:
        self._context = context
        self._handlers = context.subprocess_handlers
        self.ends: dict[int, End] = {}
        self.told: list[int] = []

    @property
    def running(self) -> list[int]:
        return [rank for rank in self._handlers if rank not in self.ends]

    def look(self) -> None:
        """Notice who has ended since the last look."""
        for rank in self.running:
            code = self._handlers[rank].proc.poll()
            if code is not None:
                report = read_report(Path(self._context.error_files[rank]))
                self.ends[rank] = End(rank, code, report, time.time(), was_told=-code in self.told)

    def send(self, number: int) -> None:
        """Send a signal to the processes that run, not to what they started: that is theirs to end."""
        self.told.append(number)
        for rank in self.running:
            with suppress(ProcessLookupError):
                os.kill(self._handlers[rank].proc.pid, number)

    def kill(self) -> None:
        """End what still runs, and what it started."""
        self.told.append(signal.SIGKILL)
        self._context.close(signal.SIGKILL, timeout=int(_ENDING))
