"""Retries of a store: their delays, messages and end, and the classification of errors; without real waiting."""

import errno
import socket
from datetime import datetime, timedelta
from itertools import pairwise

import aiohttp
import botocore.exceptions
import fsspec.exceptions
import multidict
import pytest
import yarl

from hlat.data.stores.remote import (
    MAX_OUTAGE_SECONDS,
    FetchCancelledError,
    Store,
    StoreAccessError,
    StoreRetries,
    StoreUnavailableError,
)
from hlat.runtime.errors import DataError, StorageError
from hlat.runtime.storage.object_stores import FailureKind, StorageFailure, classify_error
from hlat.runtime.storage.run_folder import EARLIER_ATTEMPT_ENV


class World:
    """A clock that ``sleep`` advances, and the messages logged with it."""

    def __init__(self, uniform: float = 1.0) -> None:
        self.time = 0.0
        self.slept: list[float] = []
        self.logged: list[str] = []
        self.retries = StoreRetries(
            "s3://corpus",
            clock=lambda: self.time,
            sleep=self.sleep,
            uniform=lambda: uniform,
            log=self.logged.append,
            now=lambda: datetime(2030, 1, 1, 14, 3) + timedelta(seconds=self.time),
        )

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


def make_error(failure: StorageFailure) -> DataError:
    """Make the exception for a permanent error."""
    return DataError(f"permanent: {failure.reason}")


class Failing:
    """An action that fails a number of times before it succeeds."""

    def __init__(self, times: int, error: BaseException | None = None) -> None:
        self.left, self.error = times, error or ConnectionRefusedError(errno.ECONNREFUSED, "no")

    def __call__(self) -> str:
        if self.left:
            self.left -= 1
            raise self.error
        return "done"


def delays(world: World) -> list[float]:
    """Return the seconds between the attempts of an action that fails nine times."""
    failing, times = Failing(9), []

    def action() -> str:
        times.append(world.time)
        return failing()

    assert world.retries.attempt("reading a").call(action, make_error) == "done"
    return [after - before for before, after in pairwise(times)]


def test_delays_double_up_to_a_limit() -> None:
    assert delays(World()) == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert delays(World(uniform=0.0)) == [0.25, 0.5, 1, 2, 4, 8, 15, 15, 15]


def test_the_beginning_and_end_of_an_outage_are_logged_once() -> None:
    world = World()
    world.retries.attempt("reading s3://corpus/a").call(Failing(7), make_error)
    assert world.logged == [
        "s3://corpus does not answer: connection refused, while reading s3://corpus/a, since 14:03:00. "
        "Trying again for up to 15 min.",
        "s3://corpus answers again, after 62 s.",
    ]


def test_a_single_failure_is_not_logged() -> None:
    world = World()
    world.retries.attempt("reading a").call(Failing(1), make_error)
    assert world.logged == []


def test_readers_of_one_store_log_an_outage_once() -> None:
    world = World()
    attempts = [world.retries.attempt(f"reading {name}") for name in "abc"]
    for loop in attempts:
        with pytest.raises(StoreUnavailableError):
            loop.call(Failing(10_000), make_error)
    assert len(world.logged) == 1


def test_repeated_outages_are_logged_at_most_once_a_minute() -> None:
    world = World()
    for _ in range(50):
        world.retries.attempt("reading a").call(Failing(3), make_error)
    lines = [line for line in world.logged if "does not answer" in line]
    assert len(lines) <= world.time / 60 + 1


def test_retries_end_after_the_maximum_outage() -> None:
    world = World()
    with pytest.raises(
        StoreUnavailableError, match=r"reading a: connection refused, since 14:03:00 \(15 min of attempts\)"
    ) as caught:
        world.retries.attempt("reading a").call(Failing(10_000), make_error)
    assert world.time == MAX_OUTAGE_SECONDS
    assert "Check that s3://corpus can be reached" in str(caught.value) and "finished work is kept" in str(caught.value)


def test_progress_starts_the_maximum_outage_again() -> None:
    world = World()
    attempts = world.retries.attempt("reading a")
    rounds = iter(range(100))

    def progress_then_fail() -> str:
        if next(rounds) < 90:
            attempts.progress()
            world.time += 600
            raise TimeoutError
        return "done"

    assert attempts.call(progress_then_fail, make_error) == "done"
    assert world.time > 50 * MAX_OUTAGE_SECONDS


def test_permanent_errors_are_not_retried() -> None:
    world = World()
    for error in (PermissionError("denied"), FileNotFoundError("none")):
        with pytest.raises(DataError, match="permanent"):
            world.retries.attempt("reading a").call(Failing(1, error), make_error)
    with pytest.raises(StorageError):
        world.retries.attempt("reading a").call(Failing(1, StorageError("full")), make_error)
    with pytest.raises(TypeError, match="our own"):
        world.retries.attempt("reading a").call(Failing(1, TypeError("our own")), make_error)
    assert world.slept == [] and world.logged == []


NO_NAME = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def test_a_name_that_does_not_resolve_fails_at_once_at_the_start() -> None:
    world = World()
    with pytest.raises(DataError, match="does not resolve"):
        world.retries.attempt("reading a").call(Failing(1, NO_NAME), make_error)
    assert world.slept == []


def test_a_name_that_has_resolved_before_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    assert world.retries.attempt("reading a").call(Failing(0), make_error) == "done"
    assert world.retries.attempt("reading a").call(Failing(9, NO_NAME), make_error) == "done"
    assert len(world.slept) > 9
    monkeypatch.setenv(EARLIER_ATTEMPT_ENV, "40 run")  # a process that a supervisor has restarted
    assert World().retries.attempt("reading a").call(Failing(9, NO_NAME), make_error) == "done"


@pytest.mark.parametrize("url", ["https://nowhere.example/a.txt", "s3://nowhere/a.txt"])
def test_a_resolver_that_fails(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the backend makes of the resolver's error, it is recognised, and nothing is waited for."""

    def fail(*arguments: object, **options: object) -> None:
        raise NO_NAME

    world = World()
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    world.retries.store = url
    with pytest.raises(StoreAccessError, match=r"cannot be reached: its name does not resolve.*copy the files"):
        Store(url, lambda _: world.retries).find()
    assert world.slept == []


def test_a_fetch_that_is_no_longer_needed_is_cancelled() -> None:
    world = World()
    with pytest.raises(FetchCancelledError):
        world.retries.attempt("reading a", lambda: world.time < 60).call(Failing(99), make_error)
    assert 60 <= world.time <= 61


def _s3(status: int, code: str) -> botocore.exceptions.ClientError:
    response = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.exceptions.ClientError(response, "GetObject")  # type: ignore[arg-type]


_NO_HEADERS: multidict.CIMultiDict[str] = multidict.CIMultiDict()


def _web(status: int) -> aiohttp.ClientResponseError:
    url = yarl.URL("https://host/a")
    return aiohttp.ClientResponseError(
        aiohttp.RequestInfo(url, "GET", multidict.CIMultiDictProxy(_NO_HEADERS), url), (), status=status
    )


def _caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


_KEY = aiohttp.client_reqrep.ConnectionKey("h", 1, False, True, None, None, None)

ERRORS = [
    (ConnectionResetError(errno.ECONNRESET, "x"), FailureKind.TRANSIENT, "connection reset by peer"),
    (TimeoutError(), FailureKind.TRANSIENT, "timed out"),
    (fsspec.exceptions.FSTimeoutError(), FailureKind.TRANSIENT, "timed out"),
    (
        aiohttp.ClientPayloadError("Response payload is not completed"),
        FailureKind.TRANSIENT,
        "payload is not completed",
    ),
    (aiohttp.ServerDisconnectedError(), FailureKind.TRANSIENT, "Server disconnected"),
    (_web(429), FailureKind.TRANSIENT, "HTTP 429 Too Many Requests"),
    (_web(502), FailureKind.TRANSIENT, "HTTP 502 Bad Gateway"),
    (_web(400), FailureKind.OTHER, "HTTP 400 Bad Request"),
    (_caused(FileNotFoundError("url"), _web(403)), FailureKind.DENIED, "HTTP 403 Forbidden"),
    (_caused(FileNotFoundError("url"), _web(404)), FailureKind.MISSING, "HTTP 404 Not Found"),
    (_caused(FileNotFoundError("url"), ConnectionRefusedError(111, "x")), FailureKind.TRANSIENT, "connection refused"),
    (_caused(OSError(errno.EBUSY, "x"), _s3(503, "SlowDown")), FailureKind.TRANSIENT, "HTTP 503 SlowDown"),
    (_caused(PermissionError("x"), _s3(403, "AccessDenied")), FailureKind.DENIED, "HTTP 403 AccessDenied"),
    (_caused(PermissionError("x"), _s3(400, "ExpiredToken")), FailureKind.DENIED, "HTTP 400 ExpiredToken"),
    (_caused(TimeoutError("x"), _s3(400, "RequestTimeout")), FailureKind.TRANSIENT, "HTTP 400 RequestTimeout"),
    (botocore.exceptions.NoCredentialsError(), FailureKind.NO_CREDENTIALS, "Unable to locate credentials"),
    (botocore.exceptions.EndpointConnectionError(endpoint_url="http://h"), FailureKind.TRANSIENT, "Could not connect"),
    (
        _caused(OSError("x"), socket.gaierror(socket.EAI_AGAIN, "try later")),
        FailureKind.NO_HOST,
        "does not resolve",
    ),
    (_caused(OSError("x"), socket.gaierror(socket.EAI_NONAME, "unknown")), FailureKind.NO_HOST, "no such host"),
    (ConnectionError("[Errno -2] Name or service not known"), FailureKind.NO_HOST, "no such host"),
]


@pytest.mark.parametrize(("error", "kind", "reason"), ERRORS)
def test_errors_are_classified(error: BaseException, kind: FailureKind, reason: str) -> None:
    failure = classify_error(error)
    assert failure.kind is kind and reason in failure.reason


def test_reasons_contain_no_secrets() -> None:
    error = OSError("503, url='https://cdn.example/a.parquet?X-Amz-Signature=abc&x=1', proxy http://me:word@proxy:80")
    assert classify_error(error).reason == "503, url='https://cdn.example/a.parquet?...', proxy http://...@proxy:80"
