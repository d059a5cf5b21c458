"""Supervise a run: one attempt after another, until one succeeds, is asked to stop, or restarts are exhausted.

    attempt: start --> wait (heartbeats: hangs, slow ranks) --> find the root cause --> end leftover processes
        --finished, stopped, the user's to fix--> exit code
        --failure--> incident, backoff, the next attempt, which resumes from the newest complete state

The policies are in ``hlat.resilience``; this module carries them out, and records events of the run.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlat.config.sections import RecoveryConfig
from hlat.launch.monitor import ObservedHang, RunMonitor
from hlat.launch.process_set import ProcessSet, end_leftovers
from hlat.launch.root_cause import RunOutcome, find_root_cause
from hlat.launch.run_events import RunEvents
from hlat.launch.wait import ProcessExit, SignalForwarder, wait_for_processes
from hlat.resilience import (
    GOODPUT_FILE,
    HEARTBEAT_FOLDER,
    AttemptFailureKind,
    Failure,
    Goodput,
    HeartbeatReading,
    RestartPolicy,
    Straggler,
    StragglerDetector,
    Watchdog,
    WorldSizePolicy,
    heartbeat_root,
    read_heartbeat_run_id,
)
from hlat.runtime.process import DEADLINE_ENV, INTERRUPTED_MESSAGE, machine_clock, stop_exit_code
from hlat.runtime.storage import EARLIER_ATTEMPT_ENV, EarlierAttempt, read_run_id

Start = Callable[[int, Mapping[str, str], Path], AbstractContextManager[ProcessSet]]
"""Launches this many processes with additional environment variables; their error reports go into the folder."""

_SAVING = 60.0  # seconds for a running save to complete after its rank ended
_POLL = 0.05
_FINAL_EXIT_CODES = (2, 4)  # exit codes of user errors and divergence: a restart would end the same way


def _ignore(outcome: RunOutcome) -> None:
    """Do nothing: the user has seen the message."""


def _hide(kind: str, fields: Mapping[str, object]) -> None:
    """Show nothing: people get messages."""


def _unobserved(beats: Path) -> AbstractContextManager[None]:
    """Observe nothing."""
    return nullcontext()


@dataclass(frozen=True)
class SupervisedRun:
    """A run to supervise.

    Attributes:
        start: launches its processes.
        sizes: numbers of processes to run with.
        run_dir: its folder.
        recovery: section ``recovery`` of its recipe.
        complain: shows an error to the user.
        say: shows other messages to the user.
        failed: called with the reason if the run fails for good.
        show_event: called with each event of the supervisor, kind and fields.
        observe: context of the run, with the folder of its heartbeats and of its account of goodput.
    """

    start: Start
    sizes: WorldSizePolicy
    run_dir: Path
    recovery: RecoveryConfig
    complain: Callable[[str], None]
    say: Callable[[str], None]
    failed: Callable[[RunOutcome], None] = _ignore
    show_event: Callable[[str, Mapping[str, Any]], None] = _hide
    observe: Callable[[Path], AbstractContextManager[None]] = _unobserved


def supervise(run: SupervisedRun) -> int:
    """Run until it succeeds or fails for good.

    Signals that ask it to stop are forwarded, and the run saves and stops without a time limit. A second signal is
    forwarded too, and ends it at once.

    Returns:
        The exit code of the same command in a single process without a supervisor.
    """
    with (
        SignalForwarder() as stops,
        tempfile.TemporaryDirectory(prefix="hlat-", dir=heartbeat_root()) as beats,
        run.observe(Path(beats)),
    ):
        return _Supervisor(run, stops, Path(beats)).run()


@dataclass(frozen=True)
class _Attempt:
    """Outcome of an attempt."""

    exits: list[ProcessExit]
    outcome: RunOutcome
    hang: ObservedHang | None
    beats: dict[int, HeartbeatReading]

    @property
    def failed(self) -> bool:
        return self.outcome.cause is not None


class _Supervisor:
    def __init__(self, run: SupervisedRun, stops: SignalForwarder, beats: Path) -> None:
        self._run, self._stops, self._beats = run, stops, beats
        self._restarts = RestartPolicy(run.recovery.restarts, run.recovery.backoff_seconds)
        self._watchdog = Watchdog(run.recovery.hang_seconds)
        self._goodput = Goodput(time.monotonic())
        self._events = RunEvents(run.run_dir / "events.jsonl", self._folder_is_ours, run.show_event)
        self._deadline = _deadline(run.recovery)
        self._count = 0
        self._trained = False
        self._durable_step = 0  # newest step that is known to be durable
        self._run_id: str | None = None  # run id in its folder

    def run(self) -> int:
        self._publish_goodput()
        while True:
            if self._stops.received:
                self._run.complain(INTERRUPTED_MESSAGE)
                return self._finish(stop_exit_code(self._stops.received[0]))
            attempt = self._attempt()
            first = attempt.beats.get(0)
            self._durable_step = _durable_step(attempt, self._durable_step)
            self._goodput.record_attempt(time.monotonic(), first, attempt.failed)
            self._publish_goodput()
            if first is not None and first.start_step is not None:
                self._trained = True
            code = self._decide(attempt)
            if code is not None:
                return self._finish(code)

    def _decide(self, attempt: _Attempt) -> int | None:
        """Return the exit code of the run, or None to try again, after the backoff."""
        outcome = attempt.outcome
        if outcome.cause is None:
            return outcome.exit_code
        failure, beat = _failure(attempt, outcome.cause, self._trained), attempt.beats.get(outcome.cause.rank)
        if failure.is_retryable and not self._stops.received:
            decision = self._restarts.decide(failure)
            self._events.incident(failure, outcome, beat, attempt.hang, decision)
            if decision.restart:
                self._run.complain(f"{outcome.message}\n{decision.reason}, in {decision.seconds:g} s")
                self._pause(failure, decision.seconds)
                return None
            self._run.complain(f"{outcome.message}\n{decision.reason}")
            self._run.failed(outcome)
            return outcome.exit_code
        if failure.is_retryable:
            self._events.incident(failure, outcome, beat, attempt.hang, None)
        self._run.complain(outcome.message)
        self._run.failed(outcome)
        return stop_exit_code(self._stops.received[0]) if failure.kind == "hang" else outcome.exit_code

    def _pause(self, failure: Failure, seconds: float) -> None:
        self._record_goodput(final=False)
        self._resize(failure)
        self._wait(seconds)
        self._goodput.record_wait(time.monotonic())
        self._publish_goodput()
        if not self._stops.received:
            self._events.event("restart", number=self._count, nproc=self._run.sizes.now)

    def _resize(self, failure: Failure) -> None:
        before = self._run.sizes.now
        if self._run.sizes.shrink_after(failure, failure.saved):
            now = self._run.sizes.now
            self._restarts.reset()
            self._events.event("resized", rank=failure.rank, before=before, now=now)
            self._run.complain(
                f"rank {failure.rank} of {before} was lost twice in a row: continuing with {now} processes"
            )

    def _attempt(self) -> _Attempt:
        run, stops, earlier = self._run, self._stops, self._describe_earlier_attempt()
        beats = self._beats / f"attempt-{self._count}"
        beats.mkdir()
        self._count += 1
        environment = {HEARTBEAT_FOLDER: str(beats), **self._deadline, **earlier}
        with (
            tempfile.TemporaryDirectory(prefix="hlat-launch-") as folder,
            run.start(run.sizes.now, environment, Path(folder)) as workers,
        ):
            slowness = StragglerDetector(run.recovery.slow_factor)
            monitor = RunMonitor(
                workers, beats, run.run_dir, self._watchdog, slowness, self._report_slow, self._folder_is_ours
            )
            exits = wait_for_processes(workers, stops, monitor)
            readings = {beat.rank: beat for beat in monitor.readings()}
            savers = {beat.saver for beat in readings.values() if beat.saver is not None}
            end_leftovers(workers, savers, _SAVING, lambda: len(stops.received) > 1)
        outcome = find_root_cause(exits, stops.received, run.run_dir)
        if monitor.hang is not None:
            outcome = RunOutcome(1, str(monitor.hang), exits[monitor.hang.hang.ranks[0]])
        return _Attempt(exits, outcome, monitor.hang, readings)

    def _describe_earlier_attempt(self) -> dict[str, str]:
        """Environment variable about the earlier attempts for the next one; none before an attempt has trained."""
        return (
            {EARLIER_ATTEMPT_ENV: EarlierAttempt(self._durable_step, self._known_run_id() or "").variable()}
            if self._trained
            else {}
        )

    def _known_run_id(self) -> str | None:
        """Id of the run's folder, once an attempt has reported it; else None."""
        if self._run_id is None and self._count:
            self._run_id = read_heartbeat_run_id(self._beats / f"attempt-{self._count - 1}")
        return self._run_id

    def _folder_is_ours(self) -> bool:
        """Return True if the run's folder still belongs to the current or last attempt."""
        run_id = self._known_run_id()
        return run_id is None or read_run_id(self._run.run_dir) == run_id

    def _report_slow(self, slow: Straggler) -> None:
        self._events.event("slow_rank", **asdict(slow))
        self._run.complain(
            f"rank {slow.rank} is slow: its work for a step takes {slow.factor:.1f} times as long as the others', "
            f"mostly in {slow.phase}"
        )

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stops.received and time.monotonic() < deadline:
            time.sleep(min(_POLL, max(0.0, deadline - time.monotonic())))

    def _finish(self, code: int) -> int:
        if self._trained:
            self._goodput.record_wait(time.monotonic())
            self._run.say(_goodput_line(self._record_goodput(final=True)))
        return code

    def _publish_goodput(self) -> None:
        """Write the account of goodput for those who observe the run."""
        with suppress(OSError):
            partial = self._beats / f"{GOODPUT_FILE}.partial"
            partial.write_text(json.dumps(self._goodput.state()), encoding="utf-8")
            partial.replace(self._beats / GOODPUT_FILE)

    def _record_goodput(self, *, final: bool) -> dict[str, float]:
        totals = self._goodput.totals()
        self._events.event("goodput", attempts=self._count, final=final, seconds=totals)
        return totals


def _failure(attempt: _Attempt, cause: ProcessExit, trained: bool) -> Failure:
    start_steps = [beat.start_step for beat in attempt.beats.values() if beat.start_step is not None]
    durable_steps = [beat.durable_step for beat in attempt.beats.values() if beat.durable_step is not None]
    kind = _failure_kind(attempt, cause)
    return Failure(kind, cause.rank, trained, max(start_steps, default=None), max(durable_steps, default=None))


def _durable_step(attempt: _Attempt, before: int) -> int:
    """Newest durable step after an attempt that ended.

    An attempt that began to train has found the newest valid checkpoint; earlier knowledge no longer counts.
    """
    start_steps = [beat.start_step for beat in attempt.beats.values() if beat.start_step is not None]
    durable_steps = [beat.durable_step for beat in attempt.beats.values() if beat.durable_step is not None]
    return max(start_steps + durable_steps) if start_steps else before


def _failure_kind(attempt: _Attempt, cause: ProcessExit) -> AttemptFailureKind:
    report = cause.report
    if attempt.hang is not None:
        return "hang"
    if report is None:
        return "signal" if cause.code < 0 else "exit" if cause.code not in _FINAL_EXIT_CODES else "user"
    return "exception" if report.is_bug else "passing" if report.retryable else "user"


def _deadline(recovery: RecoveryConfig) -> dict[str, str]:
    """Environment variable with the time by which every attempt must save and stop."""
    seconds = recovery.deadline_seconds
    return {} if seconds is None else {DEADLINE_ENV: repr(machine_clock() + seconds)}


def _goodput_line(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items() if round(value, 1))
    return f"goodput {seconds['productive'] / total:.1%} of {total:.1f} s: {parts}"
