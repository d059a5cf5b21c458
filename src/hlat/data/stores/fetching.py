"""A remote file -> the same bytes in a local file, through any number of outages, or an error.

    attempt: from where the last one broke off --bytes--> local file, sha256 on the way
    length as listed? version still the one that was listed? --> done

Nothing of another version gets in unnoticed: the version is compared before every further attempt and after the last,
and whoever knows the sha256 from an earlier fetch compares that.
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
from hlat.runtime import DataError
from hlat.runtime.storage import TransientError


@dataclass(frozen=True)
class CachedStore:
    """Where the files of a URL come from, and where they are kept."""

    store: Store
    cache: Cache

    @contextmanager
    def acquire(self, file: RemoteFile, wanted: Callable[[], bool]) -> Iterator[Path]:
        """A file on this machine, for as long as the context lasts; raises what ``fetch`` and ``Cache.acquire`` do."""
        with self.cache.acquire(file, lambda out: fetch(self.store, file, out, wanted)) as path:
            yield path


def fetch(store: Store, file: RemoteFile, out: IO[bytes], wanted: Callable[[], bool]) -> str:
    """Write a file's bytes, from the beginning of ``out`` on; returns their sha256.

    Args:
        store: where the file is.
        file: the version that is meant.
        out: seekable, and unbuffered, so that what a full disk does not take is known at once.
        wanted: whether anybody still waits for the file.

    Raises:
        DataError: missing, denied, replaced by another version, or an outage longer than a run waits for.
        OSError: the local disk refused.
        Abandoned: nobody waits any more.
    """
    attempts = store.retries.attempt(f"reading {file.url}", wanted)
    transfer = _Transfer(store, file, out, attempts, wanted)
    attempts.call(transfer.run, store.permanent_error(file))
    if transfer.refusal is not None:
        raise transfer.refusal
    return transfer.digest.hexdigest()


class _Transfer:
    """How far a file has come."""

    def __init__(
        self, store: Store, file: RemoteFile, out: IO[bytes], attempts: RetryLoop, wanted: Callable[[], bool]
    ) -> None:
        self._store, self._file, self._out = store, file, out
        self._attempts, self._wanted = attempts, wanted
        self._done = self._furthest = 0
        self._again = False
        self.digest = hashlib.sha256()
        self.refusal: OSError | None = None

    def run(self) -> None:
        """Go on until the whole file is there, or something breaks."""
        if self._again:
            self._store.check_version(self._file)
        self._again = True
        if not self._store.supports_ranges:
            self._restart()
        if not self._receive():
            return
        if self._done < self._file.size:
            raise Transient(f"only {self._done:,} of {self._file.size:,} bytes came")
        self._store.check_version(self._file)

    def _receive(self) -> bool:
        """Take what comes; False if the disk does not take it, which is no fault of the store."""
        for piece in self._store.read(self._file, self._done):
            if not self._wanted():
                raise FetchCancelledError
            self._done += len(piece)
            if self._done > self._file.size:
                raise DataError(
                    f"{self._file.url}: the server sends more than the {self._file.size:,} bytes that it says the file "
                    "has: it may compress what it sends, or the file is being written. Run again once it is complete."
                )
            try:
                _write(self._out, piece)
            except OSError as error:
                self.refusal = error
                return False
            self.digest.update(piece)
            if self._done > self._furthest:
                self._furthest = self._done
                self._attempts.progress()
        return True

    def _restart(self) -> None:
        self._out.seek(0)
        self._done = 0
        self.digest = hashlib.sha256()


def _write(out: IO[bytes], piece: bytes) -> None:
    """All of a piece: an unbuffered file may take a part of it."""
    rest = memoryview(piece)
    while rest:
        rest = rest[out.write(rest) :]
