"""Whole files of remote stores on the local disk: a folder of bounded size that several processes may share.

<cache>/<key>.parquet         a file, whole: it has this name only since all of it is on the disk
<cache>/<key>.parquet.part    one that somebody is fetching, or left behind when it was killed
<cache>/hashes.jsonl          sha256 of every file that was ever here, so that none is fetched only to be hashed again
<cache>/lock                  bytes in use, under the lock that every change takes

Whoever reads or fetches a file holds a lock (flock) on it, which goes with the process, however it ends. Files that
nobody holds go when room is needed, those first that were not used for longest.
"""

import fcntl
import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from hlat.data.stores.cache_folder import PART, CacheFolder
from hlat.data.stores.remote import RemoteFile, url_file_name
from hlat.data.stores.retries import MAX_OUTAGE_SECONDS
from hlat.runtime import DataError, StorageError

FetchInto = Callable[[IO[bytes]], str]
"""Writes a file from its first byte on; returns the sha256 of what it wrote. Called again after the disk was full.

What it writes to is unbuffered: a write may take a part of the bytes only, and says how many.
"""


class Cache:
    """A cache folder, made when it is first used.

    Args:
        folder: where.
        limit: bytes that its files may take together.
        clock: seconds that only grow.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        folder: Path,
        limit: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limit = limit
        self._folder = CacheFolder(folder)
        self._clock, self._sleep = clock, sleep
        self._mutex = threading.Lock()
        self._sizes: dict[str, int] = {}  # of the files that this process holds
        self._holders: Counter[str] = Counter()

    def known_sha256(self, file: RemoteFile) -> str | None:
        """The sha256 of a file that has been here, even if it has gone since; None for one that has not."""
        return self._folder.hashes().get(_key(file))

    @contextmanager
    def acquire(self, file: RemoteFile, write: FetchInto) -> Iterator[Path]:
        """The file, fetched if it is not here, and kept at least until the context ends.

        Args:
            file: which file, and which version of it.
            write: fetches it.

        Raises:
            DataError: the cache is too small, or what ``write`` raises.
            StorageError: the disk refused; nothing half-written stays.
        """
        key = _key(file)
        self._claim(key, file)
        try:
            with self._folder.storing(file.url):
                self._folder.open()
            path = self._folder.path / (key + _ending(file.url))
            descriptor = self._obtain(path, file, write)
            try:
                yield path
            finally:
                with suppress(OSError):
                    os.utime(descriptor)  # used until now
                os.close(descriptor)
        finally:
            self._unclaim(key)

    # --- getting a file --------------------------------------------------------------------------------------------

    def _claim(self, key: str, file: RemoteFile) -> None:
        """Count the file as held; raises DataError where what this process holds could never fit."""
        with self._mutex:
            others = sum(size for held, size in self._sizes.items() if held != key)
            if others + file.size > self.limit:
                beside = f" beside the {_gib(others)} of files that are open" if others else ""
                raise DataError(
                    f"{file.url}: its {_gib(file.size)} do not fit into the cache{beside}: data.cache_gib allows "
                    f"{_gib(self.limit)}. Raise it, on a disk that has the room (data.cache_dir)."
                )
            self._sizes[key] = file.size
            self._holders[key] += 1

    def _unclaim(self, key: str) -> None:
        with self._mutex:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key], self._sizes[key]

    def _obtain(self, path: Path, file: RemoteFile, write: FetchInto) -> int:
        """A descriptor of the whole file, with the lock that keeps it here."""
        while True:
            with self._folder.storing(file.url):
                descriptor = self._open_whole(path, file.size)
                if descriptor is not None:
                    return descriptor
                part = self._open_part(path)
            if part is not None:
                with part:
                    return self._fill(part, path, file, write)

    def _open_whole(self, path: Path, size: int) -> int | None:
        with self._folder.locked():
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                return None
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.fstat(descriptor).st_size == size:
                with suppress(OSError):
                    os.utime(descriptor)
                return descriptor
            os.close(descriptor)
            path.unlink()  # somebody else cut it off
            return None

    def _open_part(self, path: Path) -> IO[bytes] | None:
        """The file to be fetched, locked; None once another process that was fetching it is done with it."""
        part = Path(f"{path}{PART}")
        file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(part.stat(), os.fstat(file.fileno())) and not path.exists():
                    return file
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def _fill(self, part: IO[bytes], path: Path, file: RemoteFile, write: FetchInto) -> int:
        """Fetch into ``part`` and give it its name; returns a descriptor that holds it."""
        temporary = Path(f"{path}{PART}")
        try:
            self._reserve(part, file)
            sha256 = self._write(part, file, write)
            with self._folder.storing(file.url):
                os.fsync(part.fileno())
                self._folder.remember(_key(file), sha256)
                self._folder.publish(temporary, path)
            fcntl.flock(part, fcntl.LOCK_SH)
            return os.dup(part.fileno())
        except BaseException:
            self._folder.remove(temporary)
            raise

    def _reserve(self, part: IO[bytes], file: RemoteFile) -> None:
        """Make room for the file and take it at once; waits for what other processes hold."""
        began = self._clock()
        while True:
            with self._folder.storing(file.url):
                if self._folder.reserve(part, file.size, self.limit):
                    return
            if self._clock() - began > MAX_OUTAGE_SECONDS:
                raise DataError(
                    f"{file.url}: no room for its {_gib(file.size)} in {self._folder.path}: other processes hold the "
                    f"{_gib(self.limit)} that data.cache_gib allows. Raise it, or give them another data.cache_dir."
                )
            self._sleep(0.2)

    def _write(self, part: IO[bytes], file: RemoteFile, write: FetchInto) -> str:
        while True:
            part.seek(0)
            try:
                with self._folder.storing(file.url):
                    return write(part)
            except StorageError:
                if not self._folder.evict_all():
                    raise


def _key(file: RemoteFile) -> str:
    version = [file.url, file.size, file.etag, file.mtime_ns]
    return hashlib.sha256(json.dumps(version).encode()).hexdigest()[:32]


def _ending(url: str) -> str:
    """The endings that say how a file is read."""
    endings = "".join(Path(url_file_name(url)).suffixes[-2:])
    return endings if len(endings) <= 20 and endings.isascii() else ""


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 1 << 28 else f"{size / 2**20:,.1f} MiB"
