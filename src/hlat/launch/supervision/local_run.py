"""Runs whose processes are all on this machine.

ProcessSet (a launcher's) + folder of heartbeats --LocalRanks--> RunningRanks
Start, WorldSizePolicy --LocalAttempts--> one attempt after the other, each with a folder of its own
Supervision --supervise--> Supervisor of LocalAttempts --> exit code
arguments of ``hlat`` --run_processes--> the same processes, started once: no restarts, no checkpoints to wait for
"""

import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from hlat.launch.local_processes import ProcessSet, hlat_command, launch_multiprocess, signal_group
from hlat.launch.supervision.incidents import RunOutcome, find_root_cause
from hlat.launch.supervision.running_ranks import RunningRanks, SignalForwarder, wait_for_processes
from hlat.launch.supervision.supervisor import Supervision, Supervisor, heard_and_observed
from hlat.launch.worker_process import ErrorReport, read_report
from hlat.resilience import (
    HEARTBEAT_FOLDER,
    STACKS_SIGNAL,
    Failure,
    Hang,
    HeartbeatReading,
    WorldSizePolicy,
    has_stacks,
    read_heartbeat,
    read_heartbeat_run_id,
    read_saver_silence,
    read_stacks,
)
from hlat.runtime.backend.faults import request_dumps
from hlat.runtime.process import host_name, is_stopped, session_is_alive, signal_main_thread
from hlat.runtime.terminal import plural

Start = Callable[[int, Mapping[str, str], Path], AbstractContextManager[ProcessSet]]
"""Launches this many processes with additional environment variables; their error reports go into the folder."""

_DUMPING = 3.0  # seconds for libraries of collectives, which look for requests once a second
_WRITING = 2.0  # seconds for ranks to write their stacks
_LOOK = 0.002  # seconds between two looks at them
_POLL = 0.05  # seconds


class LocalRanks:
    """Processes of this machine as ``RunningRanks``; ``beats`` is the folder of their heartbeats."""

    def __init__(self, workers: ProcessSet, beats: Path) -> None:
        self._workers, self._beats = workers, beats

    @property
    def ranks(self) -> Sequence[int]:
        return sorted(self._workers.pids)

    def poll(self, rank: int) -> int | None:
        return self._workers.poll(rank)

    def report(self, rank: int) -> ErrorReport | None:
        return read_report(self._workers.error_file(rank))

    def host(self, rank: int) -> str:
        return host_name()

    def send(self, ranks: Sequence[int], number: int) -> None:
        self._send(ranks, number, os.kill)

    def kill(self, ranks: Sequence[int]) -> None:
        self.send(ranks, signal.SIGKILL)
        for rank in ranks:
            while self._workers.poll(rank) is None:
                time.sleep(_POLL)

    def end_leftovers(self, grace: float, hurries: Callable[[], bool]) -> None:
        beats = [beat for beat in self.readings() if beat.saver is not None]
        # Savers of checkpoints lead sessions of their own, as ranks do.
        leaders = {*self._workers.pids.values(), *(beat.saver for beat in beats if beat.saver is not None)}
        for leader in leaders:  # a process that was stopped with its rank must continue to finish
            signal_group(leader, signal.SIGCONT)
        begin = time.monotonic()
        # A save that makes progress may take as long as it needs.
        while not hurries() and session_is_alive(leaders):
            silence = min((read_saver_silence(self._beats, beat) for beat in beats), default=math.inf)
            if min(silence, time.monotonic() - begin) >= grace:
                break
            time.sleep(_POLL)
        for leader in leaders:
            signal_group(leader, signal.SIGKILL)

    def readings(self) -> list[HeartbeatReading]:
        found = (read_heartbeat(self._beats, rank) for rank in self.ranks)
        return [beat for beat in found if beat is not None]

    def is_stopped(self, rank: int) -> bool:
        return is_stopped(self._workers.pids[rank])

    def stacks(self) -> dict[int, str]:
        # A stopped process writes its stacks when it goes on: they show where it was stopped.
        stopped = [rank for rank in self.ranks if self.is_stopped(rank)]
        self._send(self.ranks, STACKS_SIGNAL, signal_main_thread)
        self.send(stopped, signal.SIGCONT)
        if request_dumps(self._beats):
            time.sleep(_DUMPING)
        self._wait_for_stacks(stopped)
        return {rank: read_stacks(self._beats, rank) for rank in self.ranks}

    def run_id(self) -> str | None:
        return read_heartbeat_run_id(self._beats)

    def outage(self) -> Hang | None:
        return None  # processes of one machine need no network

    def locate(self, hang: Hang) -> Hang:
        return hang

    def _send(self, ranks: Sequence[int], number: int, send: Callable[[int, int], None]) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):
                send(self._workers.pids[rank], number)

    def _wait_for_stacks(self, stopped: Sequence[int]) -> None:
        deadline, waited_for = time.monotonic() + _WRITING, {rank for rank in self.ranks if self.poll(rank) is None}
        while waited_for and time.monotonic() < deadline:
            time.sleep(_LOOK)
            done = {rank for rank in waited_for if has_stacks(self._beats, rank)}
            # Stopped again, so that they do not do much else.
            self.send([rank for rank in stopped if rank in done], signal.SIGSTOP)
            waited_for -= done
        self.send([rank for rank in stopped if rank in waited_for], signal.SIGSTOP)


class LocalAttempts:
    """Attempts on this machine, each with a folder of its own for heartbeats."""

    def __init__(self, start: Start, sizes: WorldSizePolicy, beats: Path) -> None:
        self._start, self._sizes, self._beats = start, sizes, beats
        self._count = 0

    @property
    def world(self) -> int:
        return self._sizes.now

    def prepare(self, is_stopped: Callable[[], bool]) -> None:
        """Do nothing: this machine is there."""

    @contextmanager
    def start(self, environment: Mapping[str, str]) -> Iterator[RunningRanks]:
        beats = self._beats / f"attempt-{self._count}"
        beats.mkdir()
        self._count += 1
        with (
            tempfile.TemporaryDirectory(prefix="hlat-launch-") as folder,
            self._start(self.world, {HEARTBEAT_FOLDER: str(beats), **environment}, Path(folder)) as workers,
        ):
            yield LocalRanks(workers, beats)

    def adapt(self, failure: Failure) -> str | None:
        """Go on with fewer processes if the same one was lost twice in a row."""
        before = self.world
        if not self._sizes.shrink_after(failure, failure.saved):
            return None
        return (
            f"rank {failure.rank} of {before} was lost twice in a row: continuing with {plural(self.world, 'process')}"
        )

    def goes_on(self) -> bool:
        return False  # an attempt that saves and stops was asked to by the user

    def keep(self, state: Mapping[str, Any]) -> None:
        """Do nothing: nobody takes over."""


def supervise(run: Supervision, start: Start, sizes: WorldSizePolicy) -> int:
    """Run until it succeeds or fails for good; return the exit code of a single process without a supervisor."""
    # Signals that ask it to stop are forwarded, and the run saves and stops without a time limit. A second signal is
    # forwarded too, and ends it at once.
    with heard_and_observed(run) as (stops, beats):
        return Supervisor(run, LocalAttempts(start, sizes, beats), stops, beats).run()


def run_processes(
    arguments: Sequence[str], nproc: int, folder: Path, show: Callable[[str], None] | None = None
) -> RunOutcome:
    """Run ``hlat`` with the same arguments in several processes on this machine, and wait for their end.

    ``folder`` is that of their results, which may have logs. ``show`` receives the lines that they print; None prints
    them on the streams of this process.
    """
    with (
        SignalForwarder() as stops,
        tempfile.TemporaryDirectory(prefix="hlat-launch-") as reports,
        launch_multiprocess(hlat_command(arguments), nproc, {}, Path(reports), show) as workers,
    ):
        ranks = LocalRanks(workers, Path(reports))
        exits = wait_for_processes(ranks, stops)
        ranks.end_leftovers(0.0, lambda: True)  # there is no checkpoint to wait for
    return find_root_cause(exits, stops.received, folder)
