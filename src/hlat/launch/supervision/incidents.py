"""Incidents of a run: hangs and slow ranks are found, the root cause of a failure is found, all of it is recorded.

    heartbeats --RunMonitor, a few times a second--> Watchdog --hang--> stacks of every rank, in <run.dir>/logs
                                                     StragglerDetector --> slow rank
    exit of each process --find_root_cause--> RunOutcome: the exit code that a single process would have given,
                                              and the user's message
    incident, restart, slow rank, goodput --RunEvents--> one line each in <run.dir>/events.jsonl

One failure causes others: the other ranks lose their connections, or receive the error. The user should read the first
failure that no other failure caused.

Rank 0 writes to the same file of events; each line is appended in one write. The file is opened and closed for every
event, so that the supervisor does not keep it open: the folder may be in use by another run until there is something to
record.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlat.launch.supervision.running_ranks import ProcessExit, RunningRanks
from hlat.resilience import (
    Failure,
    Hang,
    HeartbeatReading,
    RestartDecision,
    Straggler,
    StragglerDetector,
    Watchdog,
    main_thread_stack,
)
from hlat.runtime.backend.faults import DeviceFault, collect_dumps, find_fault
from hlat.runtime.errors import StorageError
from hlat.runtime.logs import log_path
from hlat.runtime.process import stop_exit_code
from hlat.tracking import EventLog

_CHECK_EVERY = 0.25  # seconds


@dataclass(frozen=True)
class ObservedHang:
    """A hang that the watchdog found, with the stacks of that moment."""

    hang: Hang
    stack: str  # stack of the main thread of the first hanging rank
    file: Path | None  # file with the stacks of all ranks; None if it cannot be written

    def __str__(self) -> str:
        return str(self.hang) if self.file is None else f"{self.hang}\nevery rank's stacks: {self.file}"

    def event_fields(self) -> dict[str, Any]:
        stacks = None if self.file is None else str(self.file)
        return {"rank": self.hang.ranks[0], **asdict(self.hang), "stack": self.stack, "stacks": stacks}


class RunMonitor:
    """Finds hangs and slow ranks of one attempt; its watchdog learns over all attempts.

    ``on_start`` is called, perhaps often, once rank 0 has a heartbeat: from then on it shows what it does. ``on_slow``
    is called with each slow rank. ``folder_is_ours`` returns True if the run's folder is still the folder of this run.
    """

    def __init__(
        self,
        workers: RunningRanks,
        run_dir: Path,
        watchdog: Watchdog,
        slowness: StragglerDetector,
        on_start: Callable[[], None],
        on_slow: Callable[[Straggler], None],
        folder_is_ours: Callable[[], bool],
    ) -> None:
        self._workers, self._run_dir = workers, run_dir
        self._watchdog, self._slowness, self._folder_is_ours = watchdog, slowness, folder_is_ours
        self._on_start, self._on_slow = on_start, on_slow
        self._next = time.monotonic()
        self.hang: ObservedHang | None = None
        self._at_hang: list[HeartbeatReading] | None = None

    def __call__(self) -> bool:
        """Check the heartbeats if a check is due; return True if the run hangs."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _CHECK_EVERY
        beats = self.readings()
        if any(beat.rank == 0 for beat in beats):
            self._on_start()
        # Slow is a rank compared with all others, so all of them have to be there.
        for slow in self._slowness.check(beats, now) if len(beats) == len(self._workers.ranks) else []:
            self._on_slow(slow)
        late = self._watchdog.check(beats, now, self._workers.is_stopped)
        hang = self._workers.outage() if late is None else self._workers.locate(late)
        if hang is not None:
            self._at_hang = beats
            self.hang = self._describe(hang, beats)
        return hang is not None

    def readings(self) -> list[HeartbeatReading]:
        """Heartbeats of the ranks that have one; after a hang, the heartbeats at the time it was found."""
        # A stopped rank that is continued to write its stacks ends the phase that hung. A later heartbeat would then
        # count that phase as work.
        if self._at_hang is not None:
            return self._at_hang
        return self._workers.readings()

    def _describe(self, hang: Hang, beats: list[HeartbeatReading]) -> ObservedHang:
        texts = self._workers.stacks()
        stack = main_thread_stack(texts.get(hang.ranks[0], ""))
        file = log_path(self._run_dir, 0).with_name(f"hang-step-{hang.step:08d}.txt")
        content = "\n\n".join(f"{_describe_heartbeat(beat)}\n{texts.get(beat.rank, '')}" for beat in beats) + "\n\n"
        with suppress(OSError):  # code that needs the disk will report its error
            if self._folder_is_ours():
                file.parent.mkdir(exist_ok=True)
                with file.open("a", encoding="utf-8") as log:  # the same step may have hung in an earlier attempt
                    log.write(content)
                return ObservedHang(hang, stack, file)
        return ObservedHang(hang, stack, None)


def _describe_heartbeat(beat: HeartbeatReading) -> str:
    what = "waits for other ranks" if beat.waiting else "at work"
    location = f", in {beat.location}" if beat.location else ""
    return f"==== rank {beat.rank}, pid {beat.pid}: {beat.phase} of step {beat.current_step}, {what}{location}"


_BUG = 1  # exit code, as Python's after an exception
_LOG_TAIL_BYTES = 1 << 16  # bytes at the end of a log where a device's fault is searched for


@dataclass(frozen=True)
class RunOutcome:
    """Exit code and message of a run."""

    exit_code: int
    message: str = ""  # message for the user; empty if the processes have printed everything
    # exit of the process that failed first; None if the run finished or was asked to stop
    cause: ProcessExit | None = None


def find_root_cause(exits: Sequence[ProcessExit], forwarded_signals: Sequence[int], run_dir: Path) -> RunOutcome:
    """Find why a run ended, from exits in rank order, signals in order of arrival, and the ranks' logs."""
    faults = {end.rank: fault for end in exits if end.failed and (fault := _device_fault(end, run_dir)) is not None}
    failures = sorted((end for end in exits if end.failed), key=lambda end: _cause_order(end, faults.get(end.rank)))
    if forwarded_signals or any(end.stopped for end in exits):
        # If one rank stops early, the others lose their connection to it: that is no failure of the run.
        failures = [end for end in failures if not _is_consequence(end)]
    if failures:
        cause = failures[0]
        code = cause.report.exit_code if cause.report is not None else max(cause.code, _BUG)
        return RunOutcome(code, _cause_message(cause, exits, run_dir, faults.get(cause.rank)), cause)
    stopped = [
        end.code if end.code > 0 else stop_exit_code(-end.code)
        for end in exits
        if end.code != 0 and (end.stopped or end.was_signalled)
    ]
    if stopped:
        return RunOutcome(stopped[0])
    # Failures that are left were consequences of the signal.
    return RunOutcome(stop_exit_code(forwarded_signals[0]) if any(end.failed for end in exits) else 0)


def _is_consequence(end: ProcessExit) -> bool:
    """Return True if a failure was caused by another process, or by a signal that the launcher sent."""
    return end.was_signalled or (end.report is not None and end.report.kind in ("forwarded", "connection"))


def _device_fault(end: ProcessExit, run_dir: Path) -> DeviceFault | None:
    """Return the fault of a device that the exception of a process names, or its log if it left no report."""
    if end.was_signalled or (end.report is not None and not end.report.is_bug):
        return None
    return find_fault(end.report.message if end.report is not None else _log_tail(log_path(run_dir, end.rank)))


def _log_tail(log: Path) -> str:
    # If there is none, or it cannot be read: another error is being explained.
    with suppress(OSError, ValueError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""


def _cause_order(end: ProcessExit, fault: DeviceFault | None) -> tuple[int, float, int]:
    """Sort key: causes before their consequences, then by time, then by rank."""
    time = end.report.time if end.report is not None else end.noticed
    if end.was_signalled:
        priority = 5
    elif fault is not None:
        # A device that waited in vain for another worker says nothing about itself.
        priority = 4 if fault.is_consequence else 0
    elif end.report is not None:
        # A forwarded error repeats the cause; a lost connection says nothing about it.
        priority = {"lost": 0, "own": 1, "forwarded": 2, "connection": 4}[end.report.kind]
    elif end.code == -signal.SIGABRT:
        priority = 3  # NCCL's watchdog aborts the process when a peer is lost
    else:
        # A signal that the launcher did not send, such as SIGKILL when memory runs out, comes from outside.
        priority = 0 if end.code < 0 else 3
    return priority, time, end.rank


def _cause_message(cause: ProcessExit, exits: Sequence[ProcessExit], run_dir: Path, fault: DeviceFault | None) -> str:
    log = log_path(run_dir, cause.rank)
    # Path.exists would raise without permission, and another error is being explained.
    where = [f"each rank's log: {log.parent}/rank-*.log"] if os.path.exists(log.parent) else []  # noqa: PTH110
    explained = [] if fault is None else [str(fault)]
    return "\n".join([_explanation(cause, exits, log), *explained, *where])


def _explanation(cause: ProcessExit, exits: Sequence[ProcessExit], log: Path) -> str:
    report = cause.report
    who = f"rank {cause.rank}" if len(exits) > 1 else "the process of the run"
    if report is not None and report.is_bug:
        return f"{who} failed:\n{report.message}"
    if report is not None:
        together = all(end.report is not None and end.report.message == report.message for end in exits)
        return f"error: {report.message}" if together else f"{who} failed: {report.message}"
    see = f"; see {log}" if os.path.exists(log) else ""  # noqa: PTH110  (as above)
    if cause.code < 0:
        memory = ", which the system sends when memory runs out" if -cause.code == signal.SIGKILL else ""
        return f"{who} was killed by {signal_name(-cause.code)}{memory}{see}"
    return f"{who} ended with exit code {cause.code} without an error report{see}"


def signal_name(number: int) -> str:
    """Name of a signal, such as ``SIGKILL``, or its number if it has none."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


class RunEvents:
    """Appends to a run's events while the folder is the run's; errors of the disk are left to the run to report."""

    def __init__(
        self, path: Path, folder_is_ours: Callable[[], bool], show: Callable[[str, Mapping[str, Any]], None]
    ) -> None:
        self._path, self._folder_is_ours, self._show = path, folder_is_ours, show

    def event(self, kind: str, /, **fields: Any) -> None:
        """Record an event with the current time."""
        self._show(kind, fields)
        if not self._folder_is_ours():
            return
        with suppress(StorageError), closing(EventLog(self._path)) as events:
            events.append(kind, **fields)

    def incident(
        self,
        failure: Failure,
        host: str,
        outcome: RunOutcome,
        beat: HeartbeatReading | None,
        observed: ObservedHang | None,
        decision: RestartDecision | None,
    ) -> None:
        """Record why an attempt ended, and the decision: None if the run had been asked to stop."""
        step, phase = (beat.current_step, beat.phase) if beat is not None else (None, None)
        if observed is not None:
            self.event("hang", **observed.event_fields())
            step, phase = observed.hang.step, observed.hang.phase
        # What the ranks' libraries of collectives have written about it.
        dumps = collect_dumps(log_path(self._path.parent, 0).parent) if self._folder_is_ours() else None
        self.event(
            "incident",
            rank=failure.rank,
            host=host,
            step=step,
            phase=phase,
            kind=failure.kind,
            cause=_short_cause(failure, outcome, observed),
            detail=outcome.message,
            restart=decision is not None and decision.restart,
            decision="the run had been asked to stop" if decision is None else decision.reason,
            seconds=0.0 if decision is None else decision.seconds,
            **({} if dumps is None else {"dumps": str(dumps)}),
        )


def _short_cause(failure: Failure, outcome: RunOutcome, observed: ObservedHang | None) -> str:
    """Cause in a few words: the signal, the last line of the exception, or the reason of the hang."""
    cause = outcome.cause
    assert cause is not None, "an incident has a cause"
    if observed is not None:
        return observed.hang.why
    if cause.report is not None:
        return cause.report.message.rpartition("\n")[2] if cause.report.is_bug else cause.report.message
    return signal_name(-cause.code) if failure.kind == "signal" else f"exit code {cause.code}"
