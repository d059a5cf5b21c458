"""Another attempt, and another: what a store that is away for a while costs is time, not the run.

    action --fails--> worth another attempt? --no--> the caller's error, at once
                        | yes: wait 0.5 s, 1 s, 2 s ... 30 s, half of it at random; said once, in one line
                        v
                      action

An outage may last ``PATIENCE``; it counts from the last byte that came, so a slow store is no outage.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

from hlat.runtime import DataError, HlatError
from hlat.runtime.storage import FailureKind, StorageFailure, classify_error

_LOG = logging.getLogger(__name__)  # not configured by hlat: Python writes its warnings to stderr, a line each

MAX_OUTAGE_SECONDS = 900.0
"""Seconds without any progress after which a store is given up. Object stores were away for minutes, rarely longer."""

_FIRST, _LONGEST = 0.5, 30.0  # seconds between attempts
_SAID_AGAIN = 60.0  # seconds: a store that answers every other request is one outage

T = TypeVar("T")


class StoreUnavailableError(DataError):
    """A store did not answer for as long as a run waits."""


class FetchCancelledError(Exception):
    """Nobody wants the result any more."""


class StoreRetries:
    """The patience with one store, shared by everything that reads from it, whatever the thread.

    Args:
        where: what is said to be away, ``s3://bucket`` for one.
        clock: seconds that only grow.
        sleep: waits for so many seconds.
        chance: a random number from [0, 1), so that many processes do not all come back at the same moment.
        say: takes a line for the user.
        now: the time of day.
    """

    def __init__(
        self,
        where: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
        say: Callable[[str], None] = _LOG.warning,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.where = where
        self._clock, self._sleep, self._chance, self._say, self._now = clock, sleep, chance, say, now
        self._lock = threading.Lock()
        self._announced = False
        self._last_said = float("-inf")

    def attempt(self, what: str, wanted: Callable[[], bool] = lambda: True) -> "RetryLoop":
        """Attempts at one thing.

        Args:
            what: what is being done, for messages: ``reading s3://bucket/a.parquet``.
            wanted: whether anybody still waits for the result; asked every second.
        """
        return RetryLoop(self, what, wanted)

    def call(self, what: str, action: Callable[[], T], refuse: Callable[[StorageFailure], Exception]) -> T:
        """The result of an action, after as many attempts as it takes; see ``Attempts.call``."""
        return self.attempt(what).call(action, refuse)


class RetryLoop:
    """Attempts at one thing; ``progress`` says that it got further: a later failure is an outage of its own."""

    def __init__(self, retries: StoreRetries, what: str, wanted: Callable[[], bool]) -> None:
        self._of, self._what, self._wanted = retries, what, wanted
        self._since: float | None = None
        self._began: datetime | None = None
        self._failures = 0

    def call(self, action: Callable[[], T], refuse: Callable[[StorageFailure], Exception]) -> T:
        """The result of an action, after as many attempts as it takes.

        Args:
            action: may be done again after it failed.
            refuse: the error for a fault that another attempt would not mend.

        Raises:
            Away: the outage lasted longer than ``PATIENCE``.
            Abandoned: nobody wants the result any more.
            Exception: what ``refuse`` made, or a HlatError that the action raised itself.
        """
        while True:
            try:
                result = action()
            except (HlatError, FetchCancelledError):
                raise
            except Exception as error:
                fault = classify_error(error)
                if fault.kind is not FailureKind.TRANSIENT:
                    raise refuse(fault) from error
                self._wait(fault, error)
            else:
                self.progress()
                return result

    def progress(self) -> None:
        """The store gave something: an outage, if there was one, is over."""
        if self._since is None:
            return
        of, since = self._of, self._since
        self._since, self._failures = None, 0
        with of._lock:
            if of._announced:
                of._announced = False
                of._say(f"{of.where} answers again, after {_duration(of._clock() - since)}.")

    def _wait(self, fault: StorageFailure, error: Exception) -> None:
        of = self._of
        if self._since is None:
            self._since, self._began = of._clock(), of._now()
        lasted = of._clock() - self._since
        if lasted >= MAX_OUTAGE_SECONDS:
            raise StoreUnavailableError(
                f"{self._what}: {fault.reason}, since {self._began:%H:%M:%S} ({_duration(lasted)} of attempts). See "
                f"whether {of.where} can be reached from here; then run the same command again: finished work is kept."
            ) from error
        self._failures += 1
        if self._failures == 2:  # one failure that is gone a moment later is nobody's concern
            self._announce(fault)
        longest = min(_FIRST * 2 ** min(self._failures - 1, 20), _LONGEST, MAX_OUTAGE_SECONDS - lasted)
        self._pause(longest * (0.5 + 0.5 * of._chance()))

    def _pause(self, seconds: float) -> None:
        """Wait, and stop waiting soon after nobody wants the result any more."""
        while seconds > 0:
            self._of._sleep(min(seconds, 1.0))
            seconds -= 1.0
            if not self._wanted():
                raise FetchCancelledError

    def _announce(self, fault: StorageFailure) -> None:
        of = self._of
        with of._lock:
            if of._announced or of._clock() - of._last_said < _SAID_AGAIN:
                return
            of._announced, of._last_said = True, of._clock()
        of._say(
            f"{of.where} does not answer: {fault.reason}, while {self._what}, since {self._began:%H:%M:%S}. "
            f"Trying again for up to {_duration(MAX_OUTAGE_SECONDS)}."
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
