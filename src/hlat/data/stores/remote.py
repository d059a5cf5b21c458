"""Object stores: list and read what a URL names, through fsspec, and outlast outages.

    s3://bucket/corpus/**/*.parquet --list--> StoredFile(path, size, version) ... --read--> bytes, in order

    action --fails--> transient error? --no--> the caller's error, at once
                        | yes: wait 0.5 s, 1 s, 2 s ... 30 s, half of it at random; logged once, in one line
                        v
                      action

Any store with an fsspec backend works. An outage costs a run time but does not end it. It may last
``MAX_OUTAGE_SECONDS``, counted from the last byte received, so a slow store is no outage.

A name that does not resolve is an outage only of a store that has answered before, in this process or in the attempt
of the run before it. At the start of a run it means a wrong name or a machine without network, and fails at once.
"""

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from hlat.runtime.errors import DataError, HlatError
from hlat.runtime.progress import advance, blocking_call
from hlat.runtime.storage.object_stores import (
    FailureKind,
    StorageFailure,
    TransientError,
    check_url,
    classify_error,
    explain_failure,
    open_filesystem,
    protocol_of,
)
from hlat.runtime.storage.run_folder import EarlierAttempt
from hlat.runtime.urls import WEB_PROTOCOLS, is_url

_LOG = logging.getLogger(__name__)  # not configured by hlat: Python writes its warnings to stderr, a line each

# Seconds without progress after which retries end. Outages of object stores last minutes, rarely longer.
MAX_OUTAGE_SECONDS = 900.0

_FIRST_DELAY, _MAX_DELAY = 0.5, 30.0  # seconds between attempts
_LOG_INTERVAL = 60.0  # seconds between messages; a store that answers every other request has one outage, not many

T = TypeVar("T")


class StoreUnavailableError(DataError):
    """A store did not answer for ``MAX_OUTAGE_SECONDS``, so retries ended."""


class FetchCancelledError(Exception):
    """The result of a fetch is no longer needed."""


class StoreRetries:
    """Retry state of one store, shared by all threads that read from it, so that an outage is logged once.

    ``has_answered`` True: the store is known to exist, although this process has not reached it yet; None asks the
    attempt of the run before. ``uniform`` draws the jitter, so that many processes do not retry at the same moment.
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
        """Return a retry loop for one action, which ends once ``still_needed`` returns False."""
        return RetryLoop(self, activity, still_needed)


class RetryLoop:
    """Retries of one action; ``progress`` ends an outage, and a later failure begins a new one."""

    def __init__(self, retries: StoreRetries, activity: str, still_needed: Callable[[], bool]) -> None:
        self._retries, self._activity, self._still_needed = retries, activity, still_needed
        self._outage_start: float | None = None
        self._outage_time: datetime | None = None
        self._failures = 0

    def call(self, action: Callable[[], T], make_error: Callable[[StorageFailure], Exception], asks: bool = True) -> T:
        """Call a repeatable action until it succeeds; ``asks``: its success is an answer of the store.

        Raises StoreUnavailableError after ``MAX_OUTAGE_SECONDS``, FetchCancelledError, a HlatError of the action, or
        what ``make_error`` makes of an error that retrying would not solve.
        """
        while True:
            try:
                with blocking_call():
                    result = action()
            except (HlatError, FetchCancelledError):
                raise
            except Exception as error:
                failure = classify_error(error)
                # At the start of a run, a name that does not resolve is a wrong name, or there is no network.
                is_outage = failure.kind is FailureKind.NO_HOST and self._retries.has_answered
                if failure.kind is not FailureKind.TRANSIENT and not is_outage:
                    raise make_error(failure) from error
                self._wait(failure, error)
            else:
                self.progress(asks)
                return result

    def progress(self, asked: bool = True) -> None:
        """Record that the store answered, or that something went well without asking it."""
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
        # The exponent is bounded: 2 ** 1100 is no float.
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


_CHUNK = 1 << 24  # bytes per request: long compared with its latency, short compared with the cost of a lost one
_STREAM_CHUNK = 1 << 20  # bytes per read from a server without range requests
_VERSION_KEYS = ("generation", "ETag", "etag", "e_tag", "Content-MD5")
_TIME_KEYS = ("LastModified", "last_modified", "Last-Modified", "mtime", "updated", "created")

_NO_RANGES = "the server does not support range requests"


class StoreAccessError(DataError):
    """A store answered, but has no such file or denies access to it."""


@dataclass(frozen=True)
class StoredFile:
    """One version of one file of a store, or of the disk."""

    path: str  # its path, or its URL without credentials
    size: int  # in bytes
    etag: str  # the store's identifier of the version, such as S3's ETag; empty if it has none
    mtime_ns: int  # time of last modification in ns, of the disk and of stores without ETag; 0 if unknown


class Store:
    """The files behind one URL of a recipe: a file, a folder or prefix, or a glob.

    DataError for a URL with credentials, an unknown protocol, or a backend that is not installed or cannot start.
    """

    def __init__(self, url: str, retries: Callable[[str], StoreRetries] = StoreRetries) -> None:
        check_url(url, DataError)
        self._url = url
        self._protocol = protocol_of(url)
        self.retries = retries(_store_name(url))
        open_it = partial(open_filesystem, url, DataError)  # some backends log in when they are made
        opening = self.retries.attempt(f"opening {url}")
        self._fs, self._root = opening.call(open_it, partial(access_error, url), asks=False)
        trimmed = url.rstrip("/")
        at_end = trimmed.endswith(self._root)
        self._prefix = trimmed[: len(trimmed) - len(self._root)] if at_end else f"{self._protocol}://"
        self.supports_ranges = True  # True if reading can start at any byte of a file

    def find(self) -> list[StoredFile]:
        """List the files, sorted as local ones; StoreAccessError or StoreUnavailableError."""
        return self.retries.attempt(f"listing {self._url}").call(self._find, partial(access_error, self._url))

    def read(self, file: StoredFile, start: int) -> Iterator[bytes]:
        """Yield the bytes from ``start`` on, in chunks; errors of the backend are passed on."""
        if not self.supports_ranges:
            yield from self._read_stream(file, start)
            return
        with self._fs.open(self._name(file.path), "rb", block_size=_CHUNK, cache_type="none") as remote:
            while start < file.size:
                remote.seek(start)
                try:
                    chunk = remote.read(min(_CHUNK, file.size - start))
                except ValueError as error:  # fsspec's error for a server without range requests
                    self.supports_ranges = False  # from now on: the next attempt starts from the beginning of the file
                    raise TransientError(_NO_RANGES) from error
                if not chunk:
                    return
                start += len(chunk)
                yield chunk

    def check_version(self, file: StoredFile) -> None:
        """Raise DataError if another version has replaced the file; backend errors are passed on."""
        now = self._remote_file(file.path, self._info(self._name(file.path)))
        if now != file:
            was, found = _describe_version(file), _describe_version(now)
            raise DataError(
                f"{file.path}: the file was replaced while it was in use (it was {was}, now it is {found}). Restore "
                "the old file, or start over with the new one."
            )

    # --- listing ---------------------------------------------------------------------------------------------------

    def _find(self) -> list[StoredFile]:
        files = [self._remote_file(self._prefix + name, info) for name, info in self._entries().items()]
        # As local files, so that a corpus has the same order in a store.
        return sorted(files, key=lambda file: PurePosixPath(file.path).parts)

    def _entries(self) -> dict[str, dict[str, Any]]:
        """Return the backend's info of each file that the URL names, by the backend's name of it."""
        web = self._protocol in WEB_PROTOCOLS
        # In a web URL, ? begins the query.
        first = min((at for sign in ("*[" if web else "*?[") if (at := self._root.find(sign)) >= 0), default=None)
        if first is not None:
            return self._matches(self._root[:first].rpartition("/")[0])
        if not (web and self._url.endswith("/")):  # a web URL without a final slash is a file
            info = self._info(self._root)
            if info.get("type") != "directory":
                return {self._root: info}
        files = self._files_below(self._root, None)
        if not files:
            raise FileNotFoundError("the folder contains no files")
        return files

    def _matches(self, folder: str) -> dict[str, dict[str, Any]]:
        """Return the files below a folder that match the URL's glob."""
        from fsspec.utils import glob_translate  # noqa: PLC0415 - fsspec is imported on first use

        recursive = "**" in self._root
        depth = None if recursive else self._root[len(folder) :].lstrip("/").count("/") + 1
        pattern = re.compile(glob_translate(self._root))
        return {name: info for name, info in self._files_below(folder, depth).items() if pattern.match(name)}

    def _files_below(self, folder: str, depth: int | None) -> dict[str, dict[str, Any]]:
        """Return the files below a folder, without hidden ones, down to a depth."""
        self._fs.invalidate_cache()
        web = self._protocol in WEB_PROTOCOLS
        found: dict[str, dict[str, Any]] = {}
        # walk, because fsspec's ``find`` and ``glob`` treat a folder that could not be listed as empty
        for _, _, files in self._fs.walk(folder + "/" * web, maxdepth=depth, detail=True, on_error="raise"):
            found |= {info["name"]: info for info in files.values()}
        visible = (name for name in found if not any(p.startswith(".") for p in name[len(folder) :].split("/")))
        names = (name for name in visible if not name.endswith("/") and not (web and "?" in name))
        return {name: found[name] for name in names}

    def _info(self, name: str) -> dict[str, Any]:
        self._fs.invalidate_cache()
        return dict(self._fs.info(name))

    def _remote_file(self, url: str, info: dict[str, Any]) -> StoredFile:
        if info.get("size") is None:  # a listing of web pages has no sizes
            info = self._info(self._name(url))
        if info.get("size") is None:
            raise DataError(
                f"{url}: the server does not report the length of the file (no Content-Length), so a partial download "
                "could not be detected. Download it by other means and give the local path."
            )
        etag = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "").removeprefix("W/").strip('"')
        time = next((info[key] for key in _TIME_KEYS if info.get(key)), None)
        return StoredFile(url, int(info["size"]), etag, 0 if etag or time is None else _nanoseconds(time))

    def _name(self, url: str) -> str:
        return url[len(self._prefix) :]

    def _read_stream(self, file: StoredFile, start: int) -> Iterator[bytes]:
        if start:
            raise TransientError(_NO_RANGES)
        with closing(self._fs.open(self._name(file.path), "rb", block_size=0)) as remote:
            while chunk := remote.read(_STREAM_CHUNK):
                yield chunk


def access_error(url: str, failure: StorageFailure) -> Exception:
    """Make the error for a failure that retrying would not solve."""
    return StoreAccessError(explain_failure(url, failure))


def local_path(path: str | Path) -> str:
    """Return the path of a ``file://`` URL, or a path with ~ expanded; return any other URL unchanged."""
    text = os.fspath(path)
    protocol, _, rest = text.partition("://")
    if is_url(text):
        return rest if protocol.lower() in ("file", "local") else text
    return os.path.expanduser(text)  # noqa: PTH111 - pathlib raises if there is no such user


def url_file_name(url: str) -> str:
    """Return the file name of a URL with its suffixes, without a query."""
    protocol = protocol_of(url)
    path = url.partition("?")[0].partition("#")[0] if protocol in WEB_PROTOCOLS else url
    return path.rstrip("/").rpartition("/")[2]


def _store_name(url: str) -> str:
    """Return the server or bucket of a URL, such as ``s3://bucket``, for messages."""
    protocol, _, rest = url.partition("://")
    return f"{protocol}://{rest.partition('/')[0]}"


def _describe_version(file: StoredFile) -> str:
    written = f", written {datetime.fromtimestamp(file.mtime_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
    version = f", version {file.etag}" if file.etag else written if file.mtime_ns else ""
    return f"{file.size:,} bytes{version}"


def _nanoseconds(time: Any) -> int:
    """Convert a time of a store, in any of its forms, to ns."""
    if isinstance(time, str):
        try:
            time = parsedate_to_datetime(time)
        except ValueError:
            time = datetime.fromisoformat(time)
    seconds = time.timestamp() if isinstance(time, datetime) else float(time)
    # truncated: a store's listings and single answers differ in the fraction
    return int(seconds) * 1_000_000_000
