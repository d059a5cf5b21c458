"""Waiting for the processes of a run, and passing on what it is asked.

    signals --Stops--> processes (once each)          processes --watch--> how each ended, in the order of ranks

A process that fails takes the others with it, since they wait for it. Most notice by themselves within milliseconds
and report what they saw, so they are given a moment to. A run that was asked to stop is given all the time that it
needs to save.
"""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType

from hlat.launch.error_report import ErrorReport, read_report
from hlat.launch.process_set import ProcessSet, kill_ranks, send_signal
from hlat.runtime.process import STOP_EXIT_CODES, STOP_SIGNALS

_POLL = 0.05
_NOTICING = 3.0  # seconds in which the others notice by themselves that one has failed
_ENDING = 30.0  # seconds in which a process that is told to end does so


@dataclass(frozen=True)
class ProcessExit:
    """How one process ended."""

    rank: int
    code: int  # exit code, or minus the signal that ended it, as subprocess has it
    report: ErrorReport | None
    noticed: float  # seconds since the epoch
    was_told: bool  # whether we had sent it the signal that ended it

    @property
    def stopped(self) -> bool:
        """Whether it was asked to stop, and did so in order."""
        return self.report is None and self.code in STOP_EXIT_CODES

    @property
    def failed(self) -> bool:
        """Whether it did not come to an end of its own, or saved and stopped."""
        return self.code != 0 and not self.stopped


class SignalForwarder:
    """Context in which the signals that ask a run to stop, unless ignored here, are kept to be passed on.

    They may arrive before there are processes to pass them to. Outside the main thread, where Python delivers no
    signals, nothing is changed.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[signal.Signals, signal.Handlers | Callable[..., object] | int | None] = {}

    def __enter__(self) -> "SignalForwarder":
        if threading.current_thread() is threading.main_thread():
            # What was ignored stays so, here and in the processes: nohup ignores SIGHUP, a background job SIGINT.
            heard = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._receive) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


def never_hangs() -> bool:
    """Nobody looks whether the run hangs."""
    return False


def wait_for_processes(
    workers: ProcessSet, stops: SignalForwarder, hangs: Callable[[], bool] = never_hangs
) -> list[ProcessExit]:
    """Wait until all processes have ended.

    Args:
        workers: the processes.
        stops: what asks the run to stop.
        hangs: asked again and again; once it says so, all processes are killed.

    Returns:
        One ``ProcessExit`` per process, in the order of ranks.
    """
    watched = _Watched(workers)
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
        if waited > _ENDING or passed_on > 2 or (watched.running and hangs()):
            watched.kill()
        if watched.running:
            time.sleep(_POLL)
    return [watched.ends[rank] for rank in sorted(watched.ends)]


class _Watched:
    """The processes: which still run, how the others ended, and what they were sent."""

    def __init__(self, workers: ProcessSet) -> None:
        self._workers = workers
        self.ends: dict[int, ProcessExit] = {}
        self.told: list[int] = []

    @property
    def running(self) -> list[int]:
        return [rank for rank in self._workers.pids if rank not in self.ends]

    def look(self) -> None:
        """Notice who has ended since the last look."""
        for rank in self.running:
            code = self._workers.poll(rank)
            if code is not None:
                report = read_report(self._workers.error_file(rank))
                self.ends[rank] = ProcessExit(rank, code, report, time.time(), was_told=-code in self.told)

    def send(self, number: int) -> None:
        """Send a signal to the processes that run."""
        self.told.append(number)
        send_signal(self._workers, self.running, number)

    def kill(self) -> None:
        """End what still runs."""
        self.told.append(signal.SIGKILL)
        kill_ranks(self._workers, self.running)
        self.look()
