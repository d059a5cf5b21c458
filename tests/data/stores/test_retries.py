"""How long a store may be away, what the user is told, and which errors are worth another attempt; without waiting."""

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

from hlat.data.stores import StoreUnavailableError
from hlat.data.stores.retries import MAX_OUTAGE_SECONDS, FetchCancelledError, StoreRetries
from hlat.runtime import DataError, StorageError
from hlat.runtime.storage import FailureKind, StorageFailure, classify_error


class World:
    """A clock that sleeping moves, and what was said."""

    def __init__(self, uniform: float = 1.0) -> None:
        self.time = 0.0
        self.slept: list[float] = []
        self.said: list[str] = []
        self.retries = StoreRetries(
            "s3://corpus",
            clock=lambda: self.time,
            sleep=self.sleep,
            uniform=lambda: uniform,
            log=self.said.append,
            now=lambda: datetime(2030, 1, 1, 14, 3) + timedelta(seconds=self.time),
        )

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


def refuse(fault: StorageFailure) -> DataError:
    """What a permanent fault becomes."""
    return DataError(f"refused: {fault.reason}")


class Failing:
    """An action that fails so many times, or always."""

    def __init__(self, times: int, error: BaseException | None = None) -> None:
        self.left, self.error = times, error or ConnectionRefusedError(errno.ECONNREFUSED, "no")

    def __call__(self) -> str:
        if self.left:
            self.left -= 1
            raise self.error
        return "done"


def waits(world: World) -> list[float]:
    """Seconds between attempts that fail nine times."""
    failing, times = Failing(9), []

    def action() -> str:
        times.append(world.time)
        return failing()

    assert world.retries.call("reading a", action, refuse) == "done"
    return [after - before for before, after in pairwise(times)]


def test_waits_double_up_to_a_limit() -> None:
    assert waits(World()) == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert waits(World(uniform=0.0)) == [0.25, 0.5, 1, 2, 4, 8, 15, 15, 15]


def test_an_outage_is_said_once_and_so_is_its_end() -> None:
    world = World()
    world.retries.call("reading s3://corpus/a", Failing(7), refuse)
    assert world.said == [
        "s3://corpus does not answer: connection refused, while reading s3://corpus/a, since 14:03:00. "
        "Trying again for up to 15 min.",
        "s3://corpus answers again, after 62 s.",
    ]


def test_one_failure_is_not_worth_a_line() -> None:
    world = World()
    world.retries.call("reading a", Failing(1), refuse)
    assert world.said == []


def test_everything_that_reads_from_a_store_shares_the_line() -> None:
    world = World()
    attempts = [world.retries.attempt(f"reading {name}") for name in "abc"]
    for one in attempts:
        with pytest.raises(StoreUnavailableError):
            one.call(Failing(10_000), refuse)
    assert len(world.said) == 1


def test_a_store_that_fails_now_and_then_is_said_at_most_once_a_minute() -> None:
    world = World()
    for _ in range(50):
        world.retries.call("reading a", Failing(3), refuse)
    lines = [line for line in world.said if "does not answer" in line]
    assert len(lines) <= world.time / 60 + 1


def test_patience_ends() -> None:
    world = World()
    with pytest.raises(
        StoreUnavailableError, match=r"reading a: connection refused, since 14:03:00 \(15 min of attempts\)"
    ) as caught:
        world.retries.call("reading a", Failing(10_000), refuse)
    assert world.time == MAX_OUTAGE_SECONDS
    assert "Check that s3://corpus can be reached" in str(caught.value) and "finished work is kept" in str(caught.value)


def test_progress_begins_the_patience_anew() -> None:
    world = World()
    attempts = world.retries.attempt("reading a")
    rounds = iter(range(100))

    def a_piece_each_time() -> str:
        if next(rounds) < 90:
            attempts.progress()
            world.time += 600
            raise TimeoutError
        return "done"

    assert attempts.call(a_piece_each_time, refuse) == "done"
    assert world.time > 50 * MAX_OUTAGE_SECONDS


def test_what_will_not_change_fails_at_once() -> None:
    world = World()
    for error in (PermissionError("denied"), FileNotFoundError("none")):
        with pytest.raises(DataError, match="refused"):
            world.retries.call("reading a", Failing(1, error), refuse)
    with pytest.raises(StorageError):
        world.retries.call("reading a", Failing(1, StorageError("full")), refuse)
    with pytest.raises(TypeError, match="our own"):
        world.retries.call("reading a", Failing(1, TypeError("our own")), refuse)
    assert world.slept == [] and world.said == []


def test_nobody_waits_for_what_nobody_wants() -> None:
    world = World()
    with pytest.raises(FetchCancelledError):
        world.retries.attempt("reading a", lambda: world.time < 60).call(Failing(99), refuse)
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

FAULTS = [
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
        aiohttp.ClientConnectorDNSError(_KEY, socket.gaierror(socket.EAI_AGAIN, "try later")),
        FailureKind.TRANSIENT,
        "Cannot connect",
    ),
    (_caused(OSError("x"), socket.gaierror(socket.EAI_NONAME, "unknown")), FailureKind.OTHER, "no such host"),
]


@pytest.mark.parametrize(("error", "kind", "reason"), FAULTS)
def test_faults(error: BaseException, kind: FailureKind, reason: str) -> None:
    fault = classify_error(error)
    assert fault.kind is kind and reason in fault.reason


def test_reasons_hold_no_secrets() -> None:
    error = OSError("503, url='https://cdn.example/a.parquet?X-Amz-Signature=abc&x=1', proxy http://me:word@proxy:80")
    assert classify_error(error).reason == "503, url='https://cdn.example/a.parquet?...', proxy http://...@proxy:80"
