"""Download a remote file to a local file, resuming after outages of the store.

    attempt: resume where the last one stopped --bytes--> local file, sha256 computed on the way
    length as listed? version still the one that was listed? --> done

Bytes of another version are always noticed: the version is compared before every further attempt and after the last.
A caller that knows the sha256 from an earlier download compares it too.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hlat.data.stores.cache import Cache
from hlat.data.stores.remote import RemoteFile, Store
from hlat.data.stores.retries import FetchCancelledError, RetryLoop
from hlat.runtime.errors import DataError
from hlat.runtime.storage.storage_errors import TransientError


@dataclass(frozen=True)
class CachedStore:
    """A remote store together with the local cache of its files."""

    store: Store
    cache: Cache

    @contextmanager
    def acquire(self, file: RemoteFile, still_needed: Callable[[], bool]) -> Iterator[Path]:
        """Yield the local path of a remote file, valid until the context ends.

        Args:
            file: the file and its version.
            still_needed: polled while fetching; the fetch is cancelled once it returns False.

        Raises:
            DataError: see ``fetch`` and ``Cache.acquire``.
            StorageError: see ``Cache.acquire``.
            FetchCancelledError: see ``fetch``.
        """
        with self.cache.acquire(file, lambda out: fetch(self.store, file, out, still_needed)) as path:
            yield path


def fetch(store: Store, file: RemoteFile, out: IO[bytes], still_needed: Callable[[], bool]) -> str:
    """Download a file into ``out``, from its beginning on, and return the sha256.

    Args:
        store: where the file is.
        file: the file and the version to download.
        out: a seekable, unbuffered file, so that a full disk is noticed at once.
        still_needed: polled while downloading; the download is cancelled once it returns False.

    Raises:
        DataError: the file is missing, denied, or was replaced by another version; or the outage was longer than
            ``MAX_OUTAGE_SECONDS``.
        OSError: the local disk refused the write.
        FetchCancelledError: ``still_needed`` returned False.
    """
    attempts = store.retries.attempt(f"reading {file.url}", still_needed)
    transfer = _Transfer(store, file, out, attempts, still_needed)
    attempts.call(transfer.run, store.permanent_error(file))
    if transfer.disk_error is not None:
        raise transfer.disk_error
    return transfer.digest.hexdigest()


class _Transfer:
    """State of one download: bytes received, their sha256, and the error of the local disk, if any."""

    def __init__(
        self, store: Store, file: RemoteFile, out: IO[bytes], attempts: RetryLoop, still_needed: Callable[[], bool]
    ) -> None:
        self._store, self._file, self._out = store, file, out
        self._attempts, self._still_needed = attempts, still_needed
        self._done = self._furthest = 0  # bytes of this attempt, and the most bytes of any attempt
        self._is_retry = False
        self.digest = hashlib.sha256()
        self.disk_error: OSError | None = None

    def run(self) -> None:
        """Make one attempt: receive bytes until the file is complete or an error occurs."""
        if self._is_retry:
            self._store.check_version(self._file)
        self._is_retry = True
        if not self._store.supports_ranges:
            self._restart()
        if not self._receive():
            return
        if self._done < self._file.size:
            raise TransientError(f"only {self._done:,} of {self._file.size:,} bytes were received")
        self._store.check_version(self._file)

    def _receive(self) -> bool:
        """Receive and write bytes; return False on an error of the local disk, which retrying would not solve."""
        for chunk in self._store.read(self._file, self._done):
            if not self._still_needed():
                raise FetchCancelledError
            self._done += len(chunk)
            if self._done > self._file.size:
                raise DataError(
                    f"{self._file.url}: the server sends more than the {self._file.size:,} bytes that it reports for "
                    "the file: it may compress the transfer, or the file is being written. Run again once it is "
                    "complete."
                )
            try:
                _write_all(self._out, chunk)
            except OSError as error:
                self.disk_error = error
                return False
            self.digest.update(chunk)
            if self._done > self._furthest:
                self._furthest = self._done
                self._attempts.progress()
        return True

    def _restart(self) -> None:
        self._out.seek(0)
        self._done = 0
        self.digest = hashlib.sha256()


def _write_all(out: IO[bytes], chunk: bytes) -> None:
    """Write a complete chunk; one write to an unbuffered file may take only some of its bytes."""
    rest = memoryview(chunk)
    while rest:
        rest = rest[out.write(rest) :]
