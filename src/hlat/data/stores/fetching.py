"""Download remote files into the cache.

    attempt: resume where the last one stopped --bytes--> local file, sha256 computed on the way
    length as listed? version still the one that was listed? --> done                            (fetch)

Bytes of another version are always noticed: the version is compared before every further attempt and after the last.
A caller that knows the sha256 from an earlier download compares it too.
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from hlat.data.stores.cache import Cache
from hlat.data.stores.remote import FetchCancelledError, Store, StoredFile, access_error
from hlat.runtime.errors import DataError
from hlat.runtime.storage.object_stores import TransientError


@dataclass(frozen=True)
class CachedStore:
    """A remote store together with the local cache of its files."""

    store: Store
    cache: Cache

    def acquire(self, file: StoredFile, still_needed: Callable[[], bool]) -> AbstractContextManager[Path]:
        """Return a context with the local path of a remote file; errors of ``fetch`` and of ``Cache.acquire``."""
        return self.cache.acquire(file, lambda out: fetch(self.store, file, out, still_needed))


def fetch(store: Store, file: StoredFile, out: IO[bytes], still_needed: Callable[[], bool]) -> str:
    """Download a file into ``out``, a seekable, unbuffered file, and return the sha256.

    DataError if it is missing, denied or replaced, or the outage exceeds ``MAX_OUTAGE_SECONDS``; OSError of the local
    disk; FetchCancelledError if ``still_needed`` returns False.
    """
    transfer = _Transfer(store, file, out, still_needed)
    transfer.attempts.call(transfer.run, partial(access_error, file.path))
    # Only here: raised in an attempt, it would be taken for an error of the store.
    if transfer.disk_error is not None:
        raise transfer.disk_error
    return transfer.digest.hexdigest()


class _Transfer:
    """State of one download: bytes received, their sha256, and the error of the local disk, if any."""

    def __init__(self, store: Store, file: StoredFile, out: IO[bytes], still_needed: Callable[[], bool]) -> None:
        self._store, self._file, self._out, self._still_needed = store, file, out, still_needed
        self.attempts = store.retries.attempt(f"reading {file.path}", still_needed)
        self._done = self._furthest = 0  # bytes of this attempt, and the most bytes of any attempt
        self._is_retry = False
        self.digest = hashlib.sha256()
        self.disk_error: OSError | None = None

    def run(self) -> None:
        """Make one attempt: receive bytes until the file is complete or an error occurs."""
        if self._is_retry:
            self._store.check_version(self._file)
        self._is_retry = True
        if not self._store.supports_ranges:  # else it goes on where the last attempt stopped
            self._out.seek(0)
            self._done = 0
            self.digest = hashlib.sha256()
        if not self._receive():
            return
        if self._done < self._file.size:
            raise TransientError(f"only {self._done:,} of {self._file.size:,} bytes were received")
        self._store.check_version(self._file)

    def _receive(self) -> bool:
        """Receive and write bytes; return False on an error of the local disk."""
        for chunk in self._store.read(self._file, self._done):
            if not self._still_needed():
                raise FetchCancelledError
            self._done += len(chunk)
            if self._done > self._file.size:
                raise DataError(
                    f"{self._file.path}: the server sends more than the {self._file.size:,} bytes that it reports for "
                    "the file: it may compress the transfer, or the file is being written. Run again once it is "
                    "complete."
                )
            try:
                rest = memoryview(chunk)
                while rest:
                    rest = rest[self._out.write(rest) :]  # one write to an unbuffered file may take only some bytes
            except OSError as error:
                self.disk_error = error
                return False
            self.digest.update(chunk)
            # A download that always starts again and always stops before this makes no progress.
            if self._done > self._furthest:
                self._furthest = self._done
                self.attempts.progress()
        return True
