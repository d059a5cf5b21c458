"""A local cache of complete remote files: a folder of bounded size, shared by any number of processes.

<cache>/<key>.parquet         a complete file; it gets this name after its last byte is on disk
<cache>/<key>.parquet.part    a file being fetched, or left behind by a killed process
<cache>/hashes.jsonl          sha256 of every file that was ever cached, so that no file is fetched only to be hashed
<cache>/lock                  bytes in use; every change of the cache takes this file's lock

A process that reads or fetches a file holds an flock on it. The kernel releases the lock when the process ends, for
whatever reason. When space is needed, unlocked files are evicted, least recently used first.
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

from hlat.data.stores.cache_folder import PART_SUFFIX, CacheFolder
from hlat.data.stores.remote import RemoteFile, url_file_name
from hlat.data.stores.retries import MAX_OUTAGE_SECONDS
from hlat.runtime.errors import DataError, StorageError

FetchInto = Callable[[IO[bytes]], str]
"""Function that fetches a complete file into an open file and returns its sha256; called again after a full disk.

The open file is unbuffered: a write may take only some of the bytes, and returns how many.
"""


class Cache:
    """A cache of remote files in a local folder, which is created on first use.

    Args:
        folder: the cache folder.
        limit: maximum total size of its files in bytes.
        clock: monotonic time in seconds.
        sleep: function that waits for a number of seconds.
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
        self._sizes: dict[str, int] = {}  # sizes by key of the files that this process has locked
        self._users: Counter[str] = Counter()

    def known_sha256(self, file: RemoteFile) -> str | None:
        """Return the sha256 of a file that was cached once, even if it was evicted since; None if it never was."""
        return self._folder.hashes().get(_key(file))

    @contextmanager
    def acquire(self, file: RemoteFile, fetch: FetchInto) -> Iterator[Path]:
        """Yield the local path of a file, fetched if it is not cached; it is not evicted before the context ends.

        Args:
            file: the file and its version.
            fetch: fetches the file.

        Raises:
            DataError: the cache is too small for the file; and whatever ``fetch`` raises.
            StorageError: the disk refused the write; no partial file is left behind.
        """
        key = _key(file)
        self._register(key, file)
        try:
            with self._folder.convert_disk_errors(file.url):
                self._folder.open()
            path = self._folder.path / (key + _suffixes(file.url))
            descriptor = self._open_or_fetch(path, file, fetch)
            try:
                yield path
            finally:
                with suppress(OSError):
                    os.utime(descriptor)  # the time of last use, for eviction
                os.close(descriptor)
        finally:
            self._unregister(key)

    # --- opening and fetching --------------------------------------------------------------------------------------

    def _register(self, key: str, file: RemoteFile) -> None:
        """Count the file as in use.

        Raises:
            DataError: the files that this process uses at the same time exceed the cache's limit.
        """
        with self._mutex:
            others = sum(size for other, size in self._sizes.items() if other != key)
            if others + file.size > self.limit:
                open_files = f" next to {_gib(others)} of open files" if others else ""
                raise DataError(
                    f"{file.url}: its {_gib(file.size)} do not fit into the cache{open_files}: data.cache_gib allows "
                    f"{_gib(self.limit)}. Raise it, on a disk with enough free space (data.cache_dir)."
                )
            self._sizes[key] = file.size
            self._users[key] += 1

    def _unregister(self, key: str) -> None:
        with self._mutex:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._sizes[key]

    def _open_or_fetch(self, path: Path, file: RemoteFile, fetch: FetchInto) -> int:
        """Return a descriptor of the complete file with a shared lock, which prevents its eviction."""
        while True:
            with self._folder.convert_disk_errors(file.url):
                descriptor = self._open_complete(path, file.size)
                if descriptor is not None:
                    return descriptor
                partial = self._open_partial(path)
            if partial is not None:
                with partial:
                    return self._fetch(partial, path, file, fetch)

    def _open_complete(self, path: Path, size: int) -> int | None:
        """Return a descriptor of a cached file with a shared lock; None if it is not cached, or was truncated."""
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
            path.unlink()  # truncated by another program
            return None

    def _open_partial(self, path: Path) -> IO[bytes] | None:
        """Open and lock the partial file; return None if another process has completed or removed it meanwhile."""
        partial = Path(f"{path}{PART_SUFFIX}")
        file = os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(partial.stat(), os.fstat(file.fileno())) and not path.exists():
                    return file
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def _fetch(self, partial: IO[bytes], path: Path, file: RemoteFile, fetch: FetchInto) -> int:
        """Fetch into ``partial`` and give it its final name; return a descriptor with a shared lock."""
        temporary = Path(f"{path}{PART_SUFFIX}")
        try:
            self._reserve(partial, file)
            sha256 = self._write(partial, file, fetch)
            with self._folder.convert_disk_errors(file.url):
                os.fsync(partial.fileno())
                self._folder.add_hash(_key(file), sha256)
                self._folder.publish(temporary, path)
            fcntl.flock(partial, fcntl.LOCK_SH)
            return os.dup(partial.fileno())
        except BaseException:
            self._folder.remove(temporary)
            raise

    def _reserve(self, partial: IO[bytes], file: RemoteFile) -> None:
        """Reserve disk space for the file, waiting for files that other processes use.

        Raises:
            DataError: no space became free within ``MAX_OUTAGE_SECONDS``.
        """
        start = self._clock()
        while True:
            with self._folder.convert_disk_errors(file.url):
                if self._folder.reserve(partial, file.size, self.limit):
                    return
            if self._clock() - start > MAX_OUTAGE_SECONDS:
                raise DataError(
                    f"{file.url}: no space for its {_gib(file.size)} in {self._folder.path}: other processes use the "
                    f"{_gib(self.limit)} that data.cache_gib allows. Raise it, or give them another data.cache_dir."
                )
            self._sleep(0.2)

    def _write(self, partial: IO[bytes], file: RemoteFile, fetch: FetchInto) -> str:
        """Fetch into ``partial`` and return the sha256; retry while evicting other files frees space on a full disk."""
        while True:
            partial.seek(0)
            try:
                with self._folder.convert_disk_errors(file.url):
                    return fetch(partial)
            except StorageError:
                if not self._folder.evict_all():
                    raise


def _key(file: RemoteFile) -> str:
    version = [file.url, file.size, file.etag, file.mtime_ns]
    return hashlib.sha256(json.dumps(version).encode()).hexdigest()[:32]


def _suffixes(url: str) -> str:
    """Return the file name's suffixes, up to two, which say how the file is read."""
    suffixes = "".join(Path(url_file_name(url)).suffixes[-2:])
    return suffixes if len(suffixes) <= 20 and suffixes.isascii() else ""


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 1 << 28 else f"{size / 2**20:,.1f} MiB"
