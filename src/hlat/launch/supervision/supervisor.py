"""Supervise a run: one attempt after another, until one succeeds, is asked to stop, or restarts are exhausted.

    attempt: start --> wait (heartbeats: hangs, slow ranks) --> find the root cause --> end leftover processes
        --finished, stopped, the user's to fix--> exit code
        --failure--> incident, backoff, the next attempt, which resumes from the newest complete state

The policies are in ``hlat.resilience``; this module carries them out, and records events of the run. Where processes
run, on this machine or on several hosts, is up to ``Attempts``.
"""

import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlat.config import Recipe, RecoveryConfig
from hlat.launch.metrics_process import Observe, unobserved
from hlat.launch.supervision.incidents import (
    ObservedHang,
    RunEvents,
    RunMonitor,
    RunOutcome,
    find_root_cause,
    signal_name,
)
from hlat.launch.supervision.running_ranks import (
    Attempts,
    ProcessExit,
    RunningRanks,
    SignalForwarder,
    Stops,
    wait_for_processes,
)
from hlat.resilience import (
    GOODPUT_FILE,
    AttemptFailureKind,
    Failure,
    Goodput,
    HeartbeatReading,
    RestartPolicy,
    Straggler,
    StragglerDetector,
    Watchdog,
    heartbeat_root,
)
from hlat.runtime.errors import DeviceMemoryError
from hlat.runtime.process import DEADLINE_ENV, INTERRUPTED_MESSAGE, lost_output, stop_exit_code
from hlat.runtime.progress import machine_clock
from hlat.runtime.storage.local_files import write_atomic
from hlat.runtime.storage.run_folder import EARLIER_ATTEMPT_ENV, EarlierAttempt, read_run_id

_SAVING = 60.0  # seconds without progress that a running save may have after its rank ended
_POLL = 0.05  # seconds
_SHORT_RUN = 600.0  # seconds: the start takes much of a shorter run, which is no fault
_FINAL_EXIT_CODES = (2, 4)  # exit codes of user errors and divergence: a restart would end the same way


def _nothing(*arguments: object) -> None:
    """Default of callbacks: nobody is told."""


@dataclass(frozen=True)
class Voice:
    """Callbacks by which a supervised run speaks to whoever has started it."""

    complain: Callable[[str], None] = _nothing  # shows an error
    say: Callable[[str], None] = _nothing  # shows other messages
    accepted: Callable[[Recipe], None] = _nothing  # called with the recipe before any process starts
    failed: Callable[[RunOutcome], None] = _nothing  # called with the reason if the run fails for good
    # receives the lines that processes print; None leaves them on the streams of this process
    show: Callable[[str], None] | None = None
    # called with each event of the supervisor, kind and fields
    show_event: Callable[[str, Mapping[str, Any]], None] = _nothing
    # shows what is being started until the function that it returns is called; it may be called again
    show_start: Callable[[str], Callable[[], None]] = lambda text: _nothing


@dataclass(frozen=True)
class Supervision:
    """Settings of a supervised run, the same on this machine and on several hosts."""

    run_dir: Path
    recovery: RecoveryConfig
    voice: Voice
    observe: Observe = unobserved  # context of the run


@contextmanager
def heard_and_observed(run: Supervision) -> Iterator[tuple[SignalForwarder, Path]]:
    """Record signals and serve the run within the block; yield them, and a folder for heartbeats and goodput."""
    with (
        SignalForwarder() as stops,
        tempfile.TemporaryDirectory(prefix="hlat-", dir=heartbeat_root()) as name,
        run.observe(Path(name)),
    ):
        yield stops, Path(name)


@dataclass(frozen=True)
class _Attempt:
    outcome: RunOutcome
    hang: ObservedHang | None
    beats: dict[int, HeartbeatReading]  # the last of each rank
    hosts: dict[int, str]  # names, by rank

    @property
    def start_steps(self) -> list[int]:
        return [beat.start_step for beat in self.beats.values() if beat.start_step is not None]

    @property
    def durable_steps(self) -> list[int]:
        return [beat.durable_step for beat in self.beats.values() if beat.durable_step is not None]


class Supervisor:
    """Carries out attempts until the run ends.

    It keeps the account of goodput in the folder ``beats``. A supervisor that takes over from another inherits its
    ``state``, which was written ``age`` seconds ago.
    """

    def __init__(
        self,
        run: Supervision,
        attempts: Attempts,
        stops: Stops,
        beats: Path,
        inherited: Mapping[str, Any] | None = None,
        age: float = 0.0,
    ) -> None:
        self._run, self._voice, self._attempts, self._stops, self._beats = run, run.voice, attempts, stops, beats
        self._restarts = RestartPolicy(run.recovery.restarts, run.recovery.backoff_seconds)
        self._watchdog = Watchdog(run.recovery.hang_seconds)
        self._goodput = Goodput(time.monotonic())
        self._events = RunEvents(run.run_dir / "events.jsonl", self._folder_is_ours, run.voice.show_event)
        self._deadline = _deadline(run.recovery)
        self._count = 0
        self._trained = False
        self._durable_step = 0  # newest step that is known to be durable
        self._run_id: str | None = None  # run id in its folder, once a rank has reported it
        self._ranks: RunningRanks | None = None
        if inherited is not None:
            self._inherit(inherited, age)

    def run(self) -> int:
        """Run until the run succeeds or fails for good; return its exit code."""
        self._publish_goodput()
        while True:
            if self._stops.received:
                self._voice.complain(INTERRUPTED_MESSAGE)
                return self._finish(stop_exit_code(self._stops.received[0]))
            self._attempts.prepare(lambda: bool(self._stops.received))
            if self._stops.received:
                continue
            attempt = self._attempt()
            first = attempt.beats.get(0)
            self._durable_step = _durable_step(attempt, self._durable_step)
            self._goodput.record_attempt(time.monotonic(), first, attempt.outcome.cause is not None)
            self._publish_goodput()
            if first is not None and first.start_step is not None:
                self._trained = True
            code = self._decide(attempt)
            if code is not None:
                return self._finish(code)

    def state(self) -> dict[str, Any]:
        """Return what another supervisor needs to go on with the run, as JSON values; times are relative."""
        goodput = self._goodput.state()
        return {
            "goodput": goodput | {"accounted_until": goodput["accounted_until"] - time.monotonic()},
            "longest_phases": self._watchdog.longest_phases,
            "newest_step": self._restarts.newest,
            "restarts_in_row": self._restarts.in_row,
            "meagre_attempts": self._restarts.meagre,
            "deadline": None if self._deadline is None else self._deadline - machine_clock(),
            "count": self._count,
            "trained": self._trained,
            "durable_step": self._durable_step,
            "run_id": self._run_id,
        }

    def _inherit(self, state: Mapping[str, Any], age: float) -> None:
        goodput = state["goodput"]
        self._goodput = Goodput.from_state(
            goodput | {"accounted_until": goodput["accounted_until"] + time.monotonic() - age}
        )
        self._watchdog.longest_phases.update(state["longest_phases"])
        self._restarts.newest, self._restarts.in_row = state["newest_step"], state["restarts_in_row"]
        self._restarts.meagre = state["meagre_attempts"]
        if state["deadline"] is not None:
            self._deadline = machine_clock() + state["deadline"] - age
        self._count, self._trained = state["count"], state["trained"]
        self._durable_step, self._run_id = state["durable_step"], state["run_id"]

    def _decide(self, attempt: _Attempt) -> int | None:
        """Return the exit code of the run, or None to try again, after the backoff."""
        outcome = attempt.outcome
        if outcome.cause is None:
            if self._attempts.goes_on() and not self._stops.received and outcome.exit_code != 0:
                return None
            if not self._trained:
                self._report_stop_before_training(outcome.exit_code)
            return outcome.exit_code
        failure, beat = _failure(attempt, outcome.cause, self._trained), attempt.beats.get(outcome.cause.rank)
        decision = None  # a run that was asked to stop is not restarted
        if failure.is_retryable:
            host = attempt.hosts[outcome.cause.rank]
            decision = None if self._stops.received else self._restarts.decide(failure)
            self._events.incident(failure, host, outcome, beat, attempt.hang, decision)
        if decision is not None and decision.restart:
            self._voice.complain(f"{outcome.message}\n{decision.reason}, in {decision.seconds:g} s")
            self._pause(failure, decision.seconds)
            return None
        self._voice.complain(outcome.message if decision is None else f"{outcome.message}\n{decision.reason}")
        self._voice.failed(outcome)
        # Hangs are retryable: one without a decision has met a run that was asked to stop.
        asked = failure.kind == "hang" and decision is None
        return stop_exit_code(self._stops.received[0]) if asked else outcome.exit_code

    def _report_stop_before_training(self, exit_code: int) -> None:
        """Say which signal ended a start; of Ctrl-C the process of rank 0 has said so."""
        if exit_code in (0, stop_exit_code(signal.SIGINT)):
            return
        received = self._stops.received
        what = signal_name(received[0]) if received else "a signal to one process"
        self._voice.complain(f"{what}: ended before the first step; run the same command again")

    def _pause(self, failure: Failure, seconds: float) -> None:
        self._record_goodput(final=False)
        self._resize(failure)
        self._wait(seconds)
        self._attempts.prepare(lambda: bool(self._stops.received))
        self._goodput.record_wait(time.monotonic())
        self._publish_goodput()
        if not self._stops.received:
            self._events.event("restart", number=self._count, nproc=self._attempts.world)

    def _resize(self, failure: Failure) -> None:
        before = self._attempts.world
        change = self._attempts.adapt(failure)
        if change is not None:
            # with other hosts or processes, restarts begin anew
            self._restarts.reset()
            self._events.event("resized", rank=failure.rank, before=before, now=self._attempts.world)
            self._voice.complain(change)

    def _attempt(self) -> _Attempt:
        run, stops = self._run, self._stops
        deadline = {} if self._deadline is None else {DEADLINE_ENV: repr(self._deadline)}
        environment = {**deadline, **self._describe_earlier_attempt()}
        self._count += 1
        self._attempts.keep(self.state())  # before the start: whoever takes over goes on with this attempt
        with self._showing_start() as has_started, self._attempts.start(environment) as ranks:
            self._ranks, slowness = ranks, StragglerDetector(run.recovery.slow_factor)
            callbacks = has_started, self._report_slow, self._folder_is_ours
            monitor = RunMonitor(ranks, run.run_dir, self._watchdog, slowness, *callbacks)
            exits = wait_for_processes(ranks, stops, monitor)
            readings = {beat.rank: beat for beat in monitor.readings()}
            ranks.end_leftovers(_SAVING, lambda: len(stops.received) > 1)
            self._run_id = self._run_id or ranks.run_id()
            self._ranks = None
            hosts = {rank: ranks.host(rank) for rank in ranks.ranks}
        outcome = find_root_cause(exits, stops.received, run.run_dir)
        if monitor.hang is not None:
            outcome = RunOutcome(1, str(monitor.hang), exits[monitor.hang.hang.ranks[0]])
        return _Attempt(outcome, monitor.hang, readings, hosts)

    @contextmanager
    def _showing_start(self) -> Iterator[Callable[[], None]]:
        world = self._attempts.world
        has_started = self._voice.show_start("starting" if world == 1 else f"starting {world} processes")
        try:
            yield has_started
        finally:
            has_started()

    def _describe_earlier_attempt(self) -> dict[str, str]:
        """Variable about the earlier attempts for the next one; none before an attempt has trained."""
        return (
            {EARLIER_ATTEMPT_ENV: EarlierAttempt(self._durable_step, self._run_id or "").variable()}
            if self._trained
            else {}
        )

    def _folder_is_ours(self) -> bool:
        """Return True if the run's folder still belongs to the current or last attempt."""
        if self._run_id is None and self._ranks is not None:
            self._run_id = self._ranks.run_id()
        return self._run_id is None or read_run_id(self._run.run_dir) == self._run_id

    def _report_slow(self, slow: Straggler) -> None:
        self._events.event("slow_rank", **asdict(slow))
        self._voice.complain(
            f"rank {slow.rank} is slow: it works {slow.factor:.1f} times as long as the others, mostly in {slow.phase}"
        )

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stops.received and time.monotonic() < deadline:
            time.sleep(min(_POLL, max(0.0, deadline - time.monotonic())))

    def _finish(self, code: int) -> int:
        if self._trained:
            self._goodput.record_wait(time.monotonic())
            self._voice.say(_goodput_line(self._record_goodput(final=True)))
            lines, why = lost_output()
            if lines:
                self._events.event("output_lost", lines=lines, why=why, process="supervisor")
        return code

    def _publish_goodput(self) -> None:
        with suppress(OSError):
            # replaced as a whole: the metrics server may read it at any time
            write_atomic(self._beats / GOODPUT_FILE, json.dumps(self._goodput.state()).encode(), sync=False)

    def _record_goodput(self, *, final: bool) -> dict[str, float]:
        totals = self._goodput.totals()
        self._events.event("goodput", attempts=self._count, final=final, seconds=totals)
        return totals


def _failure(attempt: _Attempt, cause: ProcessExit, trained: bool) -> Failure:
    kind = _failure_kind(attempt, cause)
    saves = max((beat.saves for beat in attempt.beats.values()), default=0)
    beat, mistake = attempt.beats.get(cause.rank), cause.report.mistake if cause.report is not None else ""
    if mistake and beat is not None:
        mistake += f" in step {beat.current_step}"
    start, durable = max(attempt.start_steps, default=None), max(attempt.durable_steps, default=None)
    return Failure(kind, cause.rank, trained, start, durable, saves, mistake)


def _durable_step(attempt: _Attempt, before: int) -> int:
    # An attempt that began to train has found the newest valid checkpoint; earlier knowledge no longer counts.
    return max(attempt.start_steps + attempt.durable_steps) if attempt.start_steps else before


def _failure_kind(attempt: _Attempt, cause: ProcessExit) -> AttemptFailureKind:
    report = cause.report
    if attempt.hang is not None:
        return "hang"
    if report is None:
        return "signal" if cause.code < 0 else "exit" if cause.code not in _FINAL_EXIT_CODES else "user"
    if report.kind == "lost":
        return "host"
    if report.is_bug or (report.retryable and report.error == DeviceMemoryError.__name__):
        return "exception"
    return "passing" if report.retryable else "user"


def _deadline(recovery: RecoveryConfig) -> float | None:
    return None if recovery.deadline_seconds is None else machine_clock() + recovery.deadline_seconds


def _goodput_line(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items() if round(value, 1))
    # A share is of use only for a run that is long compared with its start.
    if total < _SHORT_RUN:
        return f"time {total:.1f} s: {parts}"
    return f"goodput {seconds['productive'] / total:.1%} of {total:.1f} s: {parts}"
