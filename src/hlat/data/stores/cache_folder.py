"""The folder of a cache: the count of bytes in use, eviction, and the hashes of cached files.

Every change happens under one lock. The number of bytes in use is stored in the lock file, because counting it for
each new file would mean a stat of all files. It is counted again when the stored number says that the cache is full.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hlat.data.stores.atomic_files import is_disk_error
from hlat.runtime.errors import StorageError

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
        """Create the folder, and remove partial files that killed processes left behind.

        Raises:
            OSError: the disk refused an operation.
        """
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
        """Hold the cache's lock, exclusive among processes and threads; yield the usage, stored again if changed."""
        with os.fdopen(os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            stored = file.read(32)
            used = _Usage(int(stored) if stored.strip().isdigit() else self._count_bytes())
            before = used.bytes
            yield used
            if used.bytes != before or not stored:
                file.seek(0)
                file.write(f"{max(used.bytes, 0):<20d}\n".encode())

    # --- space -----------------------------------------------------------------------------------------------------

    def reserve(self, partial: IO[bytes], size: int, limit: int) -> bool:
        """Extend a partial file to its full length, evicting other files; return False if too many of them are locked.

        Args:
            partial: the partial file.
            size: its full length in bytes.
            limit: maximum total size of the cache in bytes.

        Raises:
            OSError: the disk refused an operation.
        """
        with self.locked() as used:
            shortage = size + _MIN_FREE_DISK - shutil.disk_usage(self.path).free
            if used.bytes + size > limit or shortage > 0:
                used.bytes = self._count_bytes()
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
        """Give a complete file its final name, under the lock: a concurrent count could see neither name, or both.

        Raises:
            OSError: the disk refused the rename.
        """
        with self.locked():
            partial.rename(path)

    def remove(self, partial: Path) -> None:
        """Remove a partial file of this process."""
        with self.locked() as used, suppress(FileNotFoundError):
            size = partial.stat().st_size
            partial.unlink()
            used.bytes -= size

    def _evict(self, min_bytes: int) -> int:
        """Remove unlocked files, least recently used first, until enough is freed; return the number of bytes."""
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
        """Append the hash of a file to ``hashes.jsonl`` and sync it.

        Raises:
            OSError: the disk refused the write.
        """
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
        """Convert an OSError of the disk into a StorageError that names the folder and the file, and says what to do.

        Raises:
            StorageError: the disk refused an operation, or has no locks. Any other OSError is passed on.
        """
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
