"""A run under supervision: attempts, one after another, until one ends well, is asked to stop, or is given up.

    attempt: start --> watch (heartbeats: hangs, slow ranks) --> judge --> clear away what is left
        --finished, stopped, the user's to put right--> exit code
        --fault--> incident, pause, the next attempt, which goes on from the newest state that is whole

What is to be done is decided in ``hlat.resilience``; here it is done, and written into the events of the run.
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from hlat.config.sections import RecoveryConfig
from hlat.launch.monitor import ObservedHang, RunMonitor
from hlat.launch.process_set import ProcessSet, end_leftovers
from hlat.launch.root_cause import RunOutcome, find_root_cause
from hlat.launch.run_events import RunEvents
from hlat.launch.wait import ProcessExit, SignalForwarder, wait_for_processes
from hlat.resilience import (
    BEATS,
    Failure,
    Goodput,
    Kind,
    Reading,
    Restarts,
    Sizes,
    Slow,
    Slowness,
    Watchdog,
    number_of_run,
)
from hlat.runtime.process import DEADLINE_ENV, INTERRUPTED_MESSAGE, machine_clock, stop_exit_code
from hlat.runtime.storage import EARLIER_ATTEMPT_ENV, EarlierAttempt, read_run_id

Start = Callable[[int, Mapping[str, str], Path], AbstractContextManager[ProcessSet]]
"""Starts so many processes with these variables besides, whose reports go into this folder."""

_SAVING = 60.0  # seconds in which a save that was under way when its rank ended may still become whole
_POLL = 0.05
_USERS = (2, 4)  # exit codes of mistakes and of numbers that diverged: another attempt would end as this one did
_IN_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class SupervisedRun:
    """What is supervised, and how.

    Attributes:
        start: starts its processes.
        sizes: how many.
        run_dir: its folder.
        recovery: of its recipe.
        complain: shows the user what went wrong.
        say: shows the user the rest.
    """

    start: Start
    sizes: Sizes
    run_dir: Path
    recovery: RecoveryConfig
    complain: Callable[[str], None]
    say: Callable[[str], None]


def supervise(run: SupervisedRun) -> int:
    """Run it, again and again if need be.

    The signals that ask it to stop are passed on, so that the run saves and stops; it is waited for until it has. A
    second one is passed on too and ends it at once.

    Returns:
        The exit code: that of the same command in one process without a supervisor.
    """
    with SignalForwarder() as stops, tempfile.TemporaryDirectory(prefix="hlat-", dir=_beats_root()) as beats:
        return _Supervisor(run, stops, Path(beats)).run()


@dataclass(frozen=True)
class _Attempt:
    """How an attempt ended."""

    ends: list[ProcessExit]
    verdict: RunOutcome
    seen: ObservedHang | None
    beats: dict[int, Reading]

    @property
    def failed(self) -> bool:
        return self.verdict.cause is not None


class _Supervisor:
    def __init__(self, run: SupervisedRun, stops: SignalForwarder, beats: Path) -> None:
        self._run, self._stops, self._beats = run, stops, beats
        self._restarts = Restarts(run.recovery.restarts, run.recovery.backoff_seconds)
        self._watchdog = Watchdog(run.recovery.hang_seconds)
        self._goodput = Goodput(time.monotonic())
        self._chronicle = RunEvents(run.run_dir / "events.jsonl", self._is_there)
        self._deadline = _deadline(run.recovery)
        self._count = 0
        self._trained = False
        self._durable = 0  # the newest step that is known to be
        self._number: str | None = None  # of the run's folder

    def run(self) -> int:
        while True:
            if self._stops.received:
                self._run.complain(INTERRUPTED_MESSAGE)
                return self._end(stop_exit_code(self._stops.received[0]))
            attempt = self._attempt()
            first = attempt.beats.get(0)
            self._durable = _durable(attempt, self._durable)
            self._goodput.ended(time.monotonic(), first, attempt.failed)
            if first is not None and first.began is not None:
                self._trained = True
            code = self._settle(attempt)
            if code is not None:
                return self._end(code)

    def _settle(self, attempt: _Attempt) -> int | None:
        """The exit code of the run; None to try again, once it has been waited for."""
        verdict = attempt.verdict
        if verdict.cause is None:
            return verdict.exit_code
        failure, beat = _failure(attempt, verdict.cause, self._trained), attempt.beats.get(verdict.cause.rank)
        if failure.is_fault and not self._stops.received:
            before = self._restarts.newest
            decision = self._restarts.after(failure)
            self._chronicle.incident(failure, verdict, beat, attempt.seen, decision)
            if decision.restart:
                self._run.complain(f"{verdict.message}\n{decision.reason}, in {decision.seconds:g} s")
                self._pause(failure, decision.seconds, self._restarts.newest != before)
                return None
            self._run.complain(f"{verdict.message}\n{decision.reason}")
            return verdict.exit_code
        if failure.is_fault:
            self._chronicle.incident(failure, verdict, beat, attempt.seen, None)
        self._run.complain(verdict.message)
        return stop_exit_code(self._stops.received[0]) if failure.kind == "hang" else verdict.exit_code

    def _pause(self, failure: Failure, seconds: float, progress: bool) -> None:
        self._account(final=False)
        self._resize(failure, progress)
        self._wait(seconds)
        self._goodput.waited(time.monotonic())
        if not self._stops.received:
            self._chronicle.event("restart", number=self._count, nproc=self._run.sizes.now)

    def _resize(self, failure: Failure, progress: bool) -> None:
        before = self._run.sizes.now
        if self._run.sizes.after(failure, progress):
            now = self._run.sizes.now
            self._restarts.begin_anew()
            self._chronicle.event("resized", rank=failure.rank, before=before, now=now)
            self._run.complain(f"rank {failure.rank} of {before} was lost twice in a row: going on with {now}")

    def _attempt(self) -> _Attempt:
        run, stops, left = self._run, self._stops, self._left()
        beats = self._beats / f"attempt-{self._count}"
        beats.mkdir()
        self._count += 1
        environment = {BEATS: str(beats), **self._deadline, **left}
        with (
            tempfile.TemporaryDirectory(prefix="hlat-launch-") as folder,
            run.start(run.sizes.now, environment, Path(folder)) as workers,
        ):
            slowness = Slowness(run.recovery.slow_factor)
            lookout = RunMonitor(workers, beats, run.run_dir, self._watchdog, slowness, self._tell_slow, self._is_there)
            ends = wait_for_processes(workers, stops, lookout)
            readings = {beat.rank: beat for beat in lookout.readings()}
            savers = {beat.saver for beat in readings.values() if beat.saver is not None}
            end_leftovers(workers, savers, _SAVING, lambda: len(stops.received) > 1)
        verdict = find_root_cause(ends, stops.received, run.run_dir)
        if lookout.seen is not None:
            verdict = RunOutcome(1, str(lookout.seen), ends[lookout.seen.hang.ranks[0]])
        return _Attempt(ends, verdict, lookout.seen, readings)

    def _left(self) -> dict[str, str]:
        """Environment variable with the folder's number and the newest durable step; none before an attempt trained."""
        return (
            {EARLIER_ATTEMPT_ENV: EarlierAttempt(self._durable, self._known() or "").variable()}
            if self._trained
            else {}
        )

    def _known(self) -> str | None:
        """The number of the run's folder, once an attempt has told it."""
        if self._number is None and self._count:
            self._number = number_of_run(self._beats / f"attempt-{self._count - 1}")
        return self._number

    def _is_there(self) -> bool:
        """Whether the run's folder is still that of the attempt that is under way, or was the last."""
        number = self._known()
        return number is None or read_run_id(self._run.run_dir) == number

    def _tell_slow(self, slow: Slow) -> None:
        self._chronicle.event("slow_rank", **asdict(slow))
        self._run.complain(
            f"rank {slow.rank} is slow: it works {slow.factor:.1f} times as long for a step as the others, "
            f"most of it in {slow.phase}"
        )

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stops.received and time.monotonic() < deadline:
            time.sleep(min(_POLL, max(0.0, deadline - time.monotonic())))

    def _end(self, code: int) -> int:
        if self._trained:
            self._goodput.waited(time.monotonic())
            self._run.say(_goodput_line(self._account(final=True)))
        return code

    def _account(self, *, final: bool) -> dict[str, float]:
        totals = self._goodput.totals()
        self._chronicle.event("goodput", attempts=self._count, final=final, seconds=totals)
        return totals


def _failure(attempt: _Attempt, cause: ProcessExit, trained: bool) -> Failure:
    began = [beat.began for beat in attempt.beats.values() if beat.began is not None]
    saved = [beat.saved for beat in attempt.beats.values() if beat.saved is not None]
    return Failure(_kind(attempt, cause), cause.rank, trained, max(began, default=None), max(saved, default=None))


def _durable(attempt: _Attempt, before: int) -> int:
    """The newest step that is durable after an attempt. One that began found what there was before it, or was told that
    it is damaged.
    """
    began = [beat.began for beat in attempt.beats.values() if beat.began is not None]
    saved = [beat.saved for beat in attempt.beats.values() if beat.saved is not None]
    return max(began + saved) if began else before


def _kind(attempt: _Attempt, cause: ProcessExit) -> Kind:
    report = cause.report
    if attempt.seen is not None:
        return "hang"
    if report is None:
        return "signal" if cause.code < 0 else "exit" if cause.code not in _USERS else "user"
    return "exception" if report.is_bug else "passing" if report.retryable else "user"


def _beats_root() -> Path | None:
    """Where heartbeats are written: in memory, or a rank would wait for a disk that is busy with its checkpoint."""
    return _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None


def _deadline(recovery: RecoveryConfig) -> dict[str, str]:
    """The time by which every attempt has to save and stop, as an environment variable."""
    seconds = recovery.deadline_seconds
    return {} if seconds is None else {DEADLINE_ENV: repr(machine_clock() + seconds)}


def _goodput_line(seconds: dict[str, float]) -> str:
    whole = sum(seconds.values())
    parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items() if round(value, 1))
    return f"goodput {seconds['productive'] / whole:.1%} of {whole:.1f} s: {parts}"
