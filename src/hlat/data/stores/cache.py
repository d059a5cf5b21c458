"""A local cache of complete remote files: a folder of bounded size, shared by any number of processes.

<cache>/<key>.parquet         a complete file; it gets this name after its last byte is on disk
<cache>/<key>.parquet.part    a file being fetched, or left behind by a killed process
<cache>/hashes.jsonl          sha256 of every file that was ever cached, so that no file is fetched only to be hashed
<cache>/lock                  bytes in use; every change of the cache takes this file's lock

    file wanted --in the folder?--> yes: flock it and read
                                    no:  make room (CacheFolder), fetch to .part, rename

A process that reads or fetches a file holds an flock on it. The kernel releases the lock when the process ends, for
whatever reason. When space is needed, unlocked files are evicted, least recently used first.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hlat.data.stores.local_files import is_disk_error
from hlat.data.stores.remote import MAX_OUTAGE_SECONDS, StoredFile, url_file_name
from hlat.runtime.errors import DataError, StorageError

PART_SUFFIX = ".part"
_LOCK, _HASHES = "lock", "hashes.jsonl"
_MIN_FREE_DISK = 1 << 30  # bytes of disk left free for other programs, as far as evicting unlocked files can
_CACHED_NAME = re.compile(r"[0-9a-f]{32}(\..{0,40})?")  # no other file in the folder is counted or removed
_NOT_A_FOLDER = {errno.ENOTDIR, errno.EEXIST}
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


@dataclass
class _Usage:
    """Total bytes of the files in the folder; a file being fetched counts with its full length."""

    bytes: int


class CacheFolder:
    """The folder of a cache; ``open`` creates it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mutex = threading.Lock()
        self._opened = False
        self._hashes: dict[str, str] | None = None

    def open(self) -> None:
        """Create the folder, and remove partial files of killed processes; OSError if the disk refuses."""
        with self._mutex:
            if self._opened:
                return
            self.path.mkdir(parents=True, exist_ok=True)
            with self.locked() as used:
                for path, _ in self._files():
                    if path.name.endswith(PART_SUFFIX):
                        _remove_unlocked(path)
                used.bytes = self._count_bytes()
            self._opened = True

    @contextmanager
    def locked(self) -> Iterator[_Usage]:
        """Hold the cache's lock, among processes and threads; yield the usage, stored if changed."""
        with os.fdopen(os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            stored = file.read(32)
            # Stored, because counting would mean a stat of all files for each new one.
            used = _Usage(int(stored) if stored.strip().isdigit() else self._count_bytes())
            before = used.bytes
            yield used
            if used.bytes != before or not stored:
                file.seek(0)
                # Numbers have a fixed width: a shorter one overwrites all of a longer one.
                file.write(f"{max(used.bytes, 0):<20d}\n".encode())

    # --- space -----------------------------------------------------------------------------------------------------

    def reserve(self, partial: IO[bytes], size: int, limit: int) -> bool:
        """Extend a partial file to ``size``, evicting others; False if too many of them are locked."""
        with self.locked() as used:
            shortage = size + _MIN_FREE_DISK - shutil.disk_usage(self.path).free
            if used.bytes + size > limit or shortage > 0:
                used.bytes = self._count_bytes()
                # Counted again first, because the stored number says that the cache is full.
                used.bytes -= self._evict(max(used.bytes + size - limit, shortage))
            if used.bytes + size > limit:
                return False
            partial.truncate(size)
            used.bytes += size
            return True

    def evict_all(self) -> int:
        """Remove every unlocked file; return the number of bytes freed."""
        with self.locked() as used:
            freed = self._evict(1 << 62)
            used.bytes -= freed
            return freed

    def publish(self, partial: Path, path: Path) -> None:
        """Give a complete file its final name; OSError if the disk refuses."""
        with self.locked():
            partial.rename(path)  # under the lock: a concurrent count could see neither name, or both

    def remove(self, partial: Path) -> None:
        """Remove a partial file of this process."""
        with self.locked() as used, suppress(FileNotFoundError):
            size = partial.stat().st_size
            partial.unlink()
            used.bytes -= size

    def _evict(self, min_bytes: int) -> int:
        """Remove unlocked files, least recently used first, until enough is freed; return the bytes."""
        freed = 0
        for _, size, path in sorted((stat.st_mtime_ns, stat.st_size, path) for path, stat in self._files()):
            if freed >= min_bytes:
                break
            if _remove_unlocked(path):
                freed += size
        return freed

    def _count_bytes(self) -> int:
        return sum(stat.st_size for _, stat in self._files())

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        with os.scandir(self.path) as entries:
            for entry in entries:
                if _CACHED_NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        yield Path(entry.path), entry.stat()

    # --- hashes ----------------------------------------------------------------------------------------------------

    def hashes(self) -> dict[str, str]:
        """Return the sha256 of every file ever cached by key, including evicted ones."""
        with self._mutex:
            if self._hashes is None:
                self._hashes = self._read_hashes()
            return self._hashes

    def add_hash(self, key: str, sha256: str) -> None:
        """Append the hash of a file to ``hashes.jsonl`` and sync it; OSError if the disk refuses."""
        known = self.hashes()
        if known.get(key) != sha256:
            with self.locked(), (self.path / _HASHES).open("ab") as file:
                file.write(json.dumps([key, sha256]).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            known[key] = sha256

    def _read_hashes(self) -> dict[str, str]:
        found = {}
        with suppress(OSError):
            for line in (self.path / _HASHES).read_bytes().splitlines():
                with suppress(ValueError, TypeError, RecursionError):  # a line truncated by a full disk or a crash
                    key, sha256 = json.loads(line)
                    found[str(key)] = str(sha256)
        return found

    # --- errors ----------------------------------------------------------------------------------------------------

    @contextmanager
    def convert_disk_errors(self, url: str) -> Iterator[None]:
        """Convert an OSError of the disk, or of missing locks, into a StorageError."""
        try:
            yield
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise StorageError(
                    f"{self.path}: the file system has no locks (flock). They keep processes from removing each "
                    "other's files. Name a folder on a local disk with data.cache_dir."
                ) from error
            if not is_disk_error(error.errno) and error.errno not in _NOT_A_FOLDER:
                raise
            raise StorageError(
                f"{self.path}: cannot store {url} here: {os.strerror(error.errno or 0)}. Free space or make the folder "
                "writable, choose another one with data.cache_dir, or lower data.cache_gib; then run the same command "
                "again: finished work is kept."
            ) from error


def _remove_unlocked(path: Path) -> bool:
    """Remove a file unless a process has it locked; return True if it was removed."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except (BlockingIOError, FileNotFoundError):
        return False
    return True


# Function that fetches a complete file into an open file and returns its sha256; called again after a full disk. The
# open file is unbuffered: a write may take only some of the bytes, and returns how many.
FetchInto = Callable[[IO[bytes]], str]


class Cache:
    """A cache of remote files of at most ``limit`` bytes in a local folder, which is created on first use."""

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

    def known_sha256(self, file: StoredFile) -> str | None:
        """Return the sha256 of a file that was cached once, even if evicted since; None if never."""
        return self._folder.hashes().get(_key(file))

    @contextmanager
    def acquire(self, file: StoredFile, fetch: FetchInto) -> Iterator[Path]:
        """Yield the local path of a file, fetched if it is not cached; not evicted before the context ends.

        DataError if the cache is too small, StorageError of the disk, and whatever ``fetch`` raises. No partial file
        stays.
        """
        key = _key(file)
        with self._in_use(key, file):
            path = self._folder.path / (key + _suffixes(file.path))
            with self._folder.convert_disk_errors(file.path):
                self._folder.open()
                descriptor = self._open_or_fetch(path, file, fetch)
            try:
                yield path
            finally:
                with suppress(OSError):
                    os.utime(descriptor)  # the time of last use, for eviction
                os.close(descriptor)

    # --- opening and fetching --------------------------------------------------------------------------------------

    @contextmanager
    def _in_use(self, key: str, file: StoredFile) -> Iterator[None]:
        """Count a file as in use; DataError if the files in use at a time exceed the limit."""
        with self._mutex:
            others = sum(size for other, size in self._sizes.items() if other != key)
            if others + file.size > self.limit:  # waiting would never end: this process itself has the others locked
                open_files = f" next to {_gib(others)} of open files" if others else ""
                raise DataError(
                    f"{file.path}: its {_gib(file.size)} do not fit into the cache{open_files}: data.cache_gib allows "
                    f"{_gib(self.limit)}. Raise it, on a disk with enough free space (data.cache_dir)."
                )
            self._sizes[key] = file.size
            self._users[key] += 1
        try:
            yield
        finally:
            with self._mutex:
                self._users[key] -= 1
                if not self._users[key]:
                    del self._users[key], self._sizes[key]

    def _open_or_fetch(self, path: Path, file: StoredFile, fetch: FetchInto) -> int:
        """Return a descriptor of the complete file with a shared lock, which prevents its eviction."""
        while True:
            descriptor = self._open_complete(path, file.size)
            if descriptor is not None:
                return descriptor
            partial = self._open_partial(path)
            if partial is not None:
                with partial:
                    return self._fetch(partial, path, file, fetch)

    def _open_complete(self, path: Path, size: int) -> int | None:
        """Return a descriptor of a cached file with a shared lock; None if it is not there, or truncated."""
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
        """Lock the partial file; None if another process has completed or removed it meanwhile."""
        partial = Path(f"{path}{PART_SUFFIX}")
        file = os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                # While this process waited for the lock, the name may have got another file.
                if os.path.samestat(partial.stat(), os.fstat(file.fileno())) and not path.exists():
                    return file
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def _fetch(self, partial: IO[bytes], path: Path, file: StoredFile, fetch: FetchInto) -> int:
        """Fetch into ``partial`` and give it its final name; return a descriptor with a shared lock."""
        temporary = Path(f"{path}{PART_SUFFIX}")
        try:
            self._reserve(partial, file)
            sha256 = self._write(partial, fetch)
            # Before the rename: a file under its final name has all of its bytes on disk.
            os.fsync(partial.fileno())
            self._folder.add_hash(_key(file), sha256)
            self._folder.publish(temporary, path)
            fcntl.flock(partial, fcntl.LOCK_SH)
            # The caller closes ``partial``; the lock stays with the copy.
            return os.dup(partial.fileno())
        except BaseException:
            self._folder.remove(temporary)
            raise

    def _reserve(self, partial: IO[bytes], file: StoredFile) -> None:
        """Reserve disk space; DataError if others keep it for ``MAX_OUTAGE_SECONDS``."""
        start = self._clock()
        while not self._folder.reserve(partial, file.size, self.limit):
            if self._clock() - start > MAX_OUTAGE_SECONDS:
                raise DataError(
                    f"{file.path}: no space for its {_gib(file.size)} in {self._folder.path}: other processes use the "
                    f"{_gib(self.limit)} that data.cache_gib allows. Raise it, or give them another data.cache_dir."
                )
            self._sleep(0.2)

    def _write(self, partial: IO[bytes], fetch: FetchInto) -> str:
        """Fetch into ``partial`` and return the sha256; retry while evicting frees a full disk."""
        while True:
            partial.seek(0)
            try:
                return fetch(partial)
            except OSError as error:
                if not is_disk_error(error.errno) or not self._folder.evict_all():
                    raise


def _key(file: StoredFile) -> str:
    version = [file.path, file.size, file.etag, file.mtime_ns]
    return hashlib.sha256(json.dumps(version).encode()).hexdigest()[:32]


def _suffixes(url: str) -> str:
    """Return the file name's suffixes, up to two, which say how the file is read."""
    suffixes = "".join(Path(url_file_name(url)).suffixes[-2:])
    return suffixes if len(suffixes) <= 20 and suffixes.isascii() else ""


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 1 << 28 else f"{size / 2**20:,.1f} MiB"
