"""The folder of a cache: how many bytes are in it, who may go, and which hashes it remembers.

Every change happens under one lock. The bytes in use are kept in the lock's file, since counting them would mean
looking at every file for every file; they are counted anew where the sum says that there is no room.
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
from hlat.runtime import StorageError

PART = ".part"
_LOCK, _HASHES = "lock", "hashes.jsonl"
_SPARE = 1 << 30  # bytes of disk to leave to others, where removing files that nobody holds can
_OURS = re.compile(r"[0-9a-f]{32}(\..{0,40})?")  # nothing else in the folder is counted or removed
_NO_FOLDER = {errno.ENOTDIR, errno.EEXIST}
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


@dataclass
class _Used:
    """Bytes of all files in the folder, those that are being fetched at their full length."""

    bytes: int


class CacheFolder:
    """The folder of a cache, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mutex = threading.Lock()
        self._opened = False
        self._hashes: dict[str, str] | None = None

    def open(self) -> None:
        """Make the folder, and remove what a killed process left half fetched.

        Raises:
            OSError: the disk refused.
        """
        with self._mutex:
            if self._opened:
                return
            self.path.mkdir(parents=True, exist_ok=True)
            with self.locked() as used:
                for path, _ in self._files():
                    if path.name.endswith(PART):
                        _remove_unheld(path)
                used.bytes = self._counted()
            self._opened = True

    @contextmanager
    def locked(self) -> Iterator[_Used]:
        """Alone among all processes and threads, with the bytes in use, which may be changed."""
        with os.fdopen(os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            stored = file.read(32)
            used = _Used(int(stored) if stored.strip().isdigit() else self._counted())
            before = used.bytes
            yield used
            if used.bytes != before or not stored:
                file.seek(0)
                file.write(f"{max(used.bytes, 0):<20d}\n".encode())

    # --- room ------------------------------------------------------------------------------------------------------

    def reserve(self, part: IO[bytes], size: int, limit: int) -> bool:
        """Give a file that is being fetched its full length, after others have gone; False where they are all held.

        Raises:
            OSError: the disk refused.
        """
        with self.locked() as used:
            tight = size + _SPARE - shutil.disk_usage(self.path).free
            if used.bytes + size > limit or tight > 0:
                used.bytes = self._counted()
                used.bytes -= self._evict(max(used.bytes + size - limit, tight))
            if used.bytes + size > limit:
                return False
            part.truncate(size)
            used.bytes += size
            return True

    def evict_all(self) -> int:
        """Remove every file that nobody holds; returns how many bytes they had."""
        with self.locked() as used:
            freed = self._evict(1 << 62)
            used.bytes -= freed
            return freed

    def publish(self, part: Path, path: Path) -> None:
        """Give a whole file its name. Whoever counts files meanwhile would see neither name, or both.

        Raises:
            OSError: the disk refused.
        """
        with self.locked():
            part.rename(path)

    def remove(self, part: Path) -> None:
        """Remove a file that this process was fetching."""
        with self.locked() as used, suppress(FileNotFoundError):
            size = part.stat().st_size
            part.unlink()
            used.bytes -= size

    def _evict(self, wanted: int) -> int:
        freed = 0
        for _, size, path in sorted((stat.st_mtime_ns, stat.st_size, path) for path, stat in self._files()):
            if freed >= wanted:
                break
            if _remove_unheld(path):
                freed += size
        return freed

    def _counted(self) -> int:
        return sum(stat.st_size for _, stat in self._files())

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        with os.scandir(self.path) as entries:
            for entry in entries:
                if _OURS.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        yield Path(entry.path), entry.stat()

    # --- hashes ----------------------------------------------------------------------------------------------------

    def hashes(self) -> dict[str, str]:
        """sha256 of the files that have been here, by key, those included that have gone since."""
        with self._mutex:
            if self._hashes is None:
                self._hashes = self._read_hashes()
            return self._hashes

    def remember(self, key: str, sha256: str) -> None:
        """Keep the hash of a file, durably.

        Raises:
            OSError: the disk refused.
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
                with suppress(ValueError, TypeError, RecursionError):  # a line that a full disk or a crash cut off
                    key, sha256 = json.loads(line)
                    found[str(key)] = str(sha256)
        return found

    # --- the disk --------------------------------------------------------------------------------------------------

    @contextmanager
    def storing(self, url: str) -> Iterator[None]:
        """Turn the disk's refusals into StorageError, naming the folder, the file, and what to do."""
        try:
            yield
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise StorageError(
                    f"{self.path}: the file system has no locks (flock), which keep processes from removing each "
                    "other's files. Name a folder on a local disk with data.cache_dir."
                ) from error
            if not is_disk_error(error.errno) and error.errno not in _NO_FOLDER:
                raise
            raise StorageError(
                f"{self.path}: cannot keep {url} here: {os.strerror(error.errno or 0)}. Free space or make the folder "
                "writable, choose another one with data.cache_dir, or lower data.cache_gib; then run the same command "
                "again: finished work is kept."
            ) from error


def _remove_unheld(path: Path) -> bool:
    """Remove a file unless some process reads or fetches it."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except (BlockingIOError, FileNotFoundError):
        return False
    return True
