"""Retries with exponential backoff and jitter, so that an outage of a store costs a run time but does not end it.

    action --fails--> transient error? --no--> the caller's error, at once
                        | yes: wait 0.5 s, 1 s, 2 s ... 30 s, half of it at random; logged once, in one line
                        v
                      action

A name that does not resolve is an outage only of a store that has answered before, in this process or in the attempt
of the run before it: at the start of a run it means a wrong name or a machine without network, and fails at once.

An outage may last ``MAX_OUTAGE_SECONDS``. It is counted from the last byte received, so a slow store is no outage.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

from hlat.runtime.errors import DataError, HlatError
from hlat.runtime.process.progress import advance, blocking_call
from hlat.runtime.storage.run_folder import EarlierAttempt
from hlat.runtime.storage.storage_errors import FailureKind, StorageFailure, classify_error

_LOG = logging.getLogger(__name__)  # not configured by hlat: Python writes its warnings to stderr, a line each

MAX_OUTAGE_SECONDS = 900.0
"""Seconds without progress after which retries end. Outages of object stores last minutes, rarely longer."""

_FIRST_DELAY, _MAX_DELAY = 0.5, 30.0  # seconds between attempts
_LOG_INTERVAL = 60.0  # seconds between messages; a store that answers every other request has one outage, not many

T = TypeVar("T")


class StoreUnavailableError(DataError):
    """A store did not answer for ``MAX_OUTAGE_SECONDS``."""


class FetchCancelledError(Exception):
    """The result of a fetch is no longer needed."""


class StoreRetries:
    """Retry state of one store, shared by all threads that read from it, so that an outage is logged once.

    Args:
        store: name of the store in messages, such as ``s3://bucket``.
        clock: monotonic time in seconds.
        sleep: function that waits for a number of seconds.
        uniform: random number from [0, 1) for the jitter, so that many processes do not retry at the same moment.
        log: function that logs one line for the user.
        now: time of day.
        has_answered: True if the store is known to exist, although this process has not reached it yet; None if this
            process goes on with a run.
    """

    def __init__(
        self,
        store: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[], float] = random.random,
        log: Callable[[str], None] = _LOG.warning,
        now: Callable[[], datetime] = datetime.now,
        has_answered: bool | None = None,
    ) -> None:
        self.store = store
        self.has_answered = EarlierAttempt.read() is not None if has_answered is None else has_answered
        self._clock, self._sleep, self._uniform, self._log, self._now = clock, sleep, uniform, log, now
        self._lock = threading.Lock()
        self._outage_logged = False
        self._last_log = float("-inf")

    def attempt(self, activity: str, still_needed: Callable[[], bool] = lambda: True) -> "RetryLoop":
        """Return a retry loop for one action.

        Args:
            activity: description of the action for messages, such as ``reading s3://bucket/a.parquet``.
            still_needed: polled every second; the loop is cancelled once it returns False.
        """
        return RetryLoop(self, activity, still_needed)

    def call(self, activity: str, action: Callable[[], T], make_error: Callable[[StorageFailure], Exception]) -> T:
        """Call an action, retried as often as needed, and return its result; see ``RetryLoop.call``."""
        return self.attempt(activity).call(action, make_error)


class RetryLoop:
    """Retries of one action; ``progress`` ends an outage, and a later failure begins a new one."""

    def __init__(self, retries: StoreRetries, activity: str, still_needed: Callable[[], bool]) -> None:
        self._retries, self._activity, self._still_needed = retries, activity, still_needed
        self._outage_start: float | None = None
        self._outage_time: datetime | None = None
        self._failures = 0

    def call(self, action: Callable[[], T], make_error: Callable[[StorageFailure], Exception], asks: bool = True) -> T:
        """Call an action, retried as often as needed, and return its result.

        Args:
            action: can be called again after it failed.
            make_error: makes the exception for an error that retrying would not solve.
            asks: True if the action has an answer of the store if it succeeds.

        Raises:
            StoreUnavailableError: the outage lasted longer than ``MAX_OUTAGE_SECONDS``.
            FetchCancelledError: the result is no longer needed.
            Exception: the one that ``make_error`` made, or a HlatError that the action raised.
        """
        while True:
            try:
                with blocking_call():
                    result = action()
            except (HlatError, FetchCancelledError):
                raise
            except Exception as error:
                failure = classify_error(error)
                is_outage = failure.kind is FailureKind.NO_HOST and self._retries.has_answered
                if failure.kind is not FailureKind.TRANSIENT and not is_outage:
                    raise make_error(failure) from error
                self._wait(failure, error)
            else:
                self.progress(asks)
                return result

    def progress(self, asked: bool = True) -> None:
        """Record that the store answered, which ends an outage; or that something went well without asking it."""
        self._retries.has_answered |= asked
        advance()
        if self._outage_start is None:
            return
        retries, start = self._retries, self._outage_start
        self._outage_start, self._failures = None, 0
        with retries._lock:
            if retries._outage_logged:
                retries._outage_logged = False
                retries._log(f"{retries.store} answers again, after {_duration(retries._clock() - start)}.")

    def _wait(self, failure: StorageFailure, error: Exception) -> None:
        retries = self._retries
        if self._outage_start is None:
            self._outage_start, self._outage_time = retries._clock(), retries._now()
        lasted = retries._clock() - self._outage_start
        if lasted >= MAX_OUTAGE_SECONDS:
            raise StoreUnavailableError(
                f"{self._activity}: {failure.reason}, since {self._outage_time:%H:%M:%S} ({_duration(lasted)} of "
                f"attempts). Check that {retries.store} can be reached from this machine; then run the same command "
                "again: finished work is kept."
            ) from error
        self._failures += 1
        if self._failures == 2:  # a single failure is not worth a message
            self._log_outage(failure)
        longest = min(_FIRST_DELAY * 2 ** min(self._failures - 1, 20), _MAX_DELAY, MAX_OUTAGE_SECONDS - lasted)
        self._pause(longest * (0.5 + 0.5 * retries._uniform()))

    def _pause(self, seconds: float) -> None:
        """Wait; raise FetchCancelledError within a second after the result is no longer needed."""
        while seconds > 0:
            with blocking_call():
                self._retries._sleep(min(seconds, 1.0))
            seconds -= 1.0
            if not self._still_needed():
                raise FetchCancelledError

    def _log_outage(self, failure: StorageFailure) -> None:
        retries = self._retries
        with retries._lock:
            if retries._outage_logged or retries._clock() - retries._last_log < _LOG_INTERVAL:
                return
            retries._outage_logged, retries._last_log = True, retries._clock()
        retries._log(
            f"{retries.store} does not answer: {failure.reason}, while {self._activity}, since "
            f"{self._outage_time:%H:%M:%S}. Trying again for up to {_duration(MAX_OUTAGE_SECONDS)}."
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
