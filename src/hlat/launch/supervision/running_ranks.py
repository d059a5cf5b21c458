"""The processes of an attempt as those who supervise them see them, on this machine or on several hosts; and their end.

    Attempts --start--> RunningRanks: exit codes, error reports, heartbeats, signals, stacks, by rank
    signals --SignalForwarder, or another Stops--> processes (once each)
    RunningRanks --wait_for_processes--> ProcessExit of every rank, in rank order

If a process fails, the others cannot continue without it. Most notice within milliseconds and report what they saw, so
they get a few seconds before they are ended. After the loss of a host they would notice nothing. A run that was asked
to stop gets all the time it needs to save.
"""

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from hlat.launch.worker_process import ErrorReport
from hlat.resilience import Failure, Hang, HeartbeatReading
from hlat.runtime.process import STOP_EXIT_CODES, STOP_SIGNALS, after_start


class RunningRanks(Protocol):
    """The processes of one attempt, by rank."""

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks of the attempt, in ascending order."""

    def poll(self, rank: int) -> int | None:
        """Exit code of a rank, or minus the signal that ended it; None while it runs."""

    def report(self, rank: int) -> ErrorReport | None:
        """Error report of a rank that has ended; None if it left none."""

    def host(self, rank: int) -> str:
        """Name of the host that a rank runs on, for messages."""

    def send(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to ranks that are not known to have ended; their child processes do not get it."""

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill ranks, including stopped ones, and wait until they have ended."""

    def end_leftovers(self, grace: float, hurries: Callable[[], bool]) -> None:
        """End processes that ranks left behind after they ended.

        Args:
            grace: seconds that a running save may be without progress.
            hurries: polled meanwhile; once it returns True, nothing is waited for.
        """

    def readings(self) -> list[HeartbeatReading]:
        """Heartbeats of the ranks that have one; times are on the monotonic clock of this process."""

    def is_stopped(self, rank: int) -> bool:
        """Return True if the process of a rank was stopped by a signal."""

    def stacks(self) -> dict[int, str]:
        """Stacks of all threads of every rank that writes them in time, else an empty text."""

    def run_id(self) -> str | None:
        """Id of the run in its folder, once a rank has reported it; else None."""

    def outage(self) -> Hang | None:
        """Return a failure of the network between the hosts of the ranks, if there is one."""

    def locate(self, hang: Hang) -> Hang:
        """Return a hang with what is known about hosts and their network."""


class Attempts(Protocol):
    """Starts attempts, one after the other."""

    @property
    def world(self) -> int:
        """Number of processes of the present attempt, or of the next one."""

    def prepare(self, is_stopped: Callable[[], bool]) -> None:
        """Settle who takes part in the next attempt; wait for hosts if need be, until ``is_stopped()``.

        Raises:
            LaunchError: too few hosts have come.
        """

    def start(self, environment: Mapping[str, str]) -> AbstractContextManager[RunningRanks]:
        """Start the processes of the next attempt; those that still run at the end of the block are killed."""

    def adapt(self, failure: Failure) -> str | None:
        """Change who takes part after a failure; return what has changed, for the user, or None."""

    def goes_on(self) -> bool:
        """Return True if the last attempt was asked to save and stop only to go on with more processes."""

    def keep(self, state: Mapping[str, Any]) -> None:
        """Keep the state of the supervision for whoever takes it over."""


class Stops(Protocol):
    """Signals that ask a run to stop."""

    @property
    def received(self) -> list[int]:
        """Signal numbers in the order of arrival."""


_POLL = 0.05  # seconds
_NOTICING = 3.0  # seconds for the other ranks to notice a failure themselves
_ENDING = 30.0  # seconds for a process to end after a signal


@dataclass(frozen=True)
class ProcessExit:
    """The end of a rank's process, as it was noticed by its launcher."""

    rank: int
    code: int  # exit code, or minus the signal that ended it, as in subprocess
    report: ErrorReport | None
    noticed: float  # time when the end was noticed, in seconds since the epoch
    was_signalled: bool  # True if the launcher had sent the signal that ended it

    @property
    def stopped(self) -> bool:
        """True if the process was asked to stop, and saved and exited in order."""
        return self.report is None and self.code in STOP_EXIT_CODES

    @property
    def failed(self) -> bool:
        """True if the process neither finished nor saved and stopped."""
        return self.code != 0 and not self.stopped


class SignalForwarder:
    """Context in which signals that ask a run to stop are recorded, to be forwarded to its processes.

    Signals may arrive before there are processes. Outside the main thread, where Python delivers no signals, the
    context has no effect.
    """

    def __init__(self) -> None:
        self.received: list[int] = []  # in the order of arrival
        self._previous: dict[signal.Signals, signal.Handlers | Callable[..., object] | int | None] = {}

    def __enter__(self) -> "SignalForwarder":
        if threading.current_thread() is threading.main_thread():
            # Ignored signals stay ignored, here and in the processes: nohup ignores SIGHUP, a background job SIGINT.
            heard = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._receive) for number in heard}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, after_start(handler))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


def wait_for_processes(
    workers: RunningRanks, signals: Stops, hangs: Callable[[], bool] = lambda: False
) -> list[ProcessExit]:
    """Wait until all processes have ended; return their exits in rank order.

    Received signals are forwarded. Once ``hangs()`` returns True, all processes are killed.
    """
    tracker = _ProcessTracker(workers)
    forwarded = 0
    hurried_since: float | None = None  # time of the first failure or second signal; monotonic seconds
    while tracker.running:
        tracker.poll()
        for number in signals.received[forwarded:]:
            tracker.send(number)
            forwarded += 1
        failed = any(exited.failed for exited in tracker.exits.values())
        if hurried_since is None and (failed or forwarded > 1):
            hurried_since = time.monotonic()
        waited = 0.0 if hurried_since is None else time.monotonic() - hurried_since
        if failed and not tracker.sent and waited > _NOTICING:  # these have not noticed the failure themselves
            tracker.send(signal.SIGTERM)
        # Ranks do not notice the loss of a host, and would wait for it in vain.
        lost = any(exited.report is not None and exited.report.kind == "lost" for exited in tracker.exits.values())
        if lost or waited > _ENDING or forwarded > 2 or (tracker.running and hangs()):
            tracker.kill()
        if tracker.running:
            time.sleep(_POLL)
    return [tracker.exits[rank] for rank in sorted(tracker.exits)]


class _ProcessTracker:
    """The processes: which are running, how the others ended, and which signals were sent."""

    def __init__(self, workers: RunningRanks) -> None:
        self._workers = workers
        self.exits: dict[int, ProcessExit] = {}
        self.sent: list[int] = []

    @property
    def running(self) -> list[int]:
        return [rank for rank in self._workers.ranks if rank not in self.exits]

    def poll(self) -> None:
        for rank in self.running:
            code = self._workers.poll(rank)
            if code is not None:
                report = self._workers.report(rank)
                self.exits[rank] = ProcessExit(rank, code, report, time.time(), was_signalled=-code in self.sent)

    def send(self, number: int) -> None:
        self.sent.append(number)
        self._workers.send(self.running, number)

    def kill(self) -> None:
        self.sent.append(signal.SIGKILL)
        self._workers.kill(self.running)
        self.poll()
