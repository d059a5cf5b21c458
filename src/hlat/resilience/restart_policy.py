"""Restart policy: decide whether a failed run is restarted, after how many seconds, and with how many processes.

    failure, newest durable step --RestartPolicy----> restart after a backoff, or give up
                                 --WorldSizePolicy--> number of processes

Errors that the user has to fix are never retried. Other failures are, as long as the run makes progress: it is given up
after ``recovery.restarts`` restarts in a row without a new checkpoint, and after ten attempts in a row that gained one
checkpoint each and then failed by themselves: they repeat what fails, and would for ever. A mistake in a program that
was raised twice by the same line in the same step is not tried a third time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hlat.runtime.terminal import plural

# ``signal``: a process was killed. ``exception``: it raised an unexpected exception. ``passing``: an error that may be
# transient, such as a storage error. ``exit``: it ended without reporting an error. ``hang``: it hung. ``host``: its
# host is lost. ``user``: an error that only the user can fix.
AttemptFailureKind = Literal["signal", "exception", "passing", "exit", "hang", "host", "user"]

_MAX_BACKOFF = 60.0  # seconds
_MOST_MEAGRE = 10  # attempts in a row with one new checkpoint or none
_OF_ITSELF = ("hang", "exception", "exit")  # a lost host, a killed process or a full disk repeats nothing


@dataclass(frozen=True)
class Failure:
    """Failure that ended an attempt, as the supervisor knows it."""

    kind: AttemptFailureKind
    rank: int
    trained: bool  # True if a step had begun, in this attempt or an earlier one
    start_step: int | None  # step that the attempt started from; None if it failed before
    durable_step: int | None  # newest step that it is known to have made durable
    saves: int = 0  # states that it is known to have made durable
    mistake: str = ""  # class, place and step of an exception that the same state would raise again; empty for others

    @property
    def is_retryable(self) -> bool:
        # Before the first step, an exception or a storage error would be raised again.
        return self.trained if self.kind in ("passing", "exception") else self.kind != "user"

    @property
    def saved(self) -> bool:
        """True if the attempt made a checkpoint durable, as far as it knew."""
        # A save that became durable after its end is found by the next attempt, as the step that it starts from.
        start = -1 if self.start_step is None else self.start_step
        return self.durable_step is not None and self.durable_step > start


@dataclass(frozen=True)
class RestartDecision:
    """Restart or not, and why."""

    restart: bool
    seconds: float  # wait before the restart
    reason: str


class RestartPolicy:
    """Decides about restarts: at most ``limit`` in a row may bring no new checkpoint.

    ``backoff`` is in seconds, before the first of them; it doubles with each, up to a minute.
    """

    def __init__(self, limit: int, backoff: float) -> None:
        self._limit, self._backoff = limit, backoff
        self.newest = -1  # newest durable step known; -1 if there is none
        self.in_row = 0  # restarts since the last progress
        self.meagre = 0  # attempts in a row with one new durable state or none, that failed by themselves
        self._saves = 0  # of the last attempt
        self._mistake = ""  # of the last attempt

    def decide(self, failure: Failure) -> RestartDecision:
        """Decide whether to restart after a failure, and count it."""
        self._record_progress(failure)
        if not failure.is_retryable:
            return RestartDecision(False, 0.0, "a restart would not help")
        if self.in_row >= self._limit:
            tried = (
                f"{plural(self.in_row, 'restart')} in a row brought no new checkpoint" if self.in_row else "no restarts"
            )
            return RestartDecision(False, 0.0, f"given up: {tried} (recovery.restarts={self._limit})")
        before, self._mistake = self._mistake, failure.mistake
        if failure.mistake and failure.mistake == before and self.in_row:  # without progress in between
            return RestartDecision(False, 0.0, f"given up: {failure.mistake} twice; a restart would raise it again")
        if self.meagre >= _MOST_MEAGRE:
            return RestartDecision(False, 0.0, self._livelock_message(failure))
        seconds = min(self._backoff * 2**self.in_row, max(_MAX_BACKOFF, self._backoff))
        self.in_row += 1
        return RestartDecision(True, seconds, f"restart {self.in_row} of {self._limit} without a new checkpoint")

    def reset(self) -> None:
        """Reset the counts of failures in a row, after a change of the world size."""
        self.in_row = self.meagre = 0

    def _livelock_message(self, failure: Failure) -> str:
        return (
            f"given up: each of the last {self.meagre} attempts gained one checkpoint at most and then failed by "
            f"itself, lately by {failure.kind}. Remove the cause (events `incident` of events.jsonl), or save more "
            "often (checkpoint.every_steps, checkpoint.local); the same command resumes"
        )

    def _record_progress(self, failure: Failure) -> None:
        found_later = failure.start_step is not None and failure.start_step > self.newest  # saved by the one before
        if self._saves + found_later > 1:
            self.meagre = 0
        self._saves = failure.saves
        self.meagre = self.meagre + 1 if failure.kind in _OF_ITSELF and failure.saves <= 1 else 0
        # A newer durable step than all before is progress.
        known = max((step for step in (failure.start_step, failure.durable_step) if step is not None), default=-1)
        if known > self.newest:
            self.newest = known
            self.in_row = 0


class WorldSizePolicy:
    """Number of processes of an elastic run, from ``most`` down to ``least`` where the recipe ``fits``."""

    def __init__(self, least: int, most: int, fits: Callable[[int], bool]) -> None:
        self._least, self._fits = least, fits
        self.now = most  # current number of processes
        self._suspect: int | None = None

    def shrink_after(self, failure: Failure, progress: bool) -> bool:
        """Take a smaller number if the same rank was lost twice in a row without progress; True if changed."""
        # The rank's machine or chip may be broken. An exception is a fault of the program, which would fail on fewer
        # ranks too.
        lost = failure.kind in ("signal", "hang")
        again = lost and not progress and failure.rank == self._suspect
        self._suspect = failure.rank if lost else None
        smaller = [size for size in range(self.now - 1, self._least - 1, -1) if self._fits(size)] if again else []
        if not smaller:
            return False
        self.now, self._suspect = smaller[0], None
        return True
