"""Files of the local disk: written completely or not at all, and damage to them noticed.

    chunks --write--> temporary file --fsync--> --rename--> final name, with a checksum     (AtomicFileWriter)
    record --canonical JSON--> sha256 --> the last key of the record                        (with_checksum)
    page of a file --sha256, 8 bytes--> not recorded yet: write it                          (ContentRecord)
                                        recorded: the same, or a DataError with the file

A file is complete under its final name, or absent. ``convert_disk_errors`` turns an OSError of the local disk into the
StorageError that users see.

The checksum of a JSON record covers its values, not its formatting: line breaks can change. It protects against a
flipped bit, not against manipulation, because anyone can compute it again.

A content record is one file of cells of 8 bytes: one per page, and one per file for its time stamp, set once all of its
pages are recorded. A cell of zeros is empty. Equal content gives equal cells, so any number of processes may fill a
record without a lock, and a process that is killed leaves a record that is right as far as it goes. Memory holds a bit
per page that this process has compared. 10 TB in pages of 1 MiB: 80 MB on disk, 1.2 MB of bits.

Worker processes import this module, so it imports no heavier room.
"""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from hlat.runtime.errors import DataError, StorageError
from hlat.runtime.storage.local_files import write_atomic

_DISK_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
}


class AtomicFileWriter:
    """A file written chunk by chunk under a temporary name; ``close`` gives it its final name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.with_name(f"{path.name}.tmp").open("wb")
        self._digest = hashlib.sha256()

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def write(self, chunk: bytes) -> None:
        self._file.write(chunk)
        self._digest.update(chunk)

    def close(self, checksum_suffix: str | None = None) -> str:
        """Sync the file, give it its final name, and return its sha256; OSError if the disk refuses."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sha256 = self._digest.hexdigest()
        # first: a file that exists under its final name always has a checksum file
        if checksum_suffix is not None:
            write_atomic(self._path.with_name(f"{self._path.name}{checksum_suffix}"), sha256.encode())
        Path(self._file.name).replace(self._path)
        return sha256

    def abandon(self) -> None:
        Path(self._file.name).unlink(missing_ok=True)
        with suppress(OSError):  # closing flushes the buffer, and a full disk refuses that too
            self._file.close()


def is_disk_error(number: int | None) -> bool:
    """Return True if an errno says that the disk refused (full, read-only, no permission, I/O error)."""
    return number in _DISK_ERRORS


@contextmanager
def convert_disk_errors(folder: Path, chosen_by: str = "data.prepared_dir") -> Iterator[None]:
    """Convert an OSError of the disk into a StorageError that names the folder and its setting, and says what to do."""
    try:
        yield
    except OSError as error:
        if not is_disk_error(error.errno):
            raise
        raise StorageError(
            f"{folder}: cannot write prepared data: {os.strerror(error.errno or 0)}. Free space or make the folder "
            f"writable, or choose another one with {chosen_by}; then run the same command again: finished work is kept."
        ) from error


CHECKSUM_KEY = "checksum"


def checksum_of(record: dict[str, Any]) -> str:
    """Compute the sha256 of a record without its checksum, in canonical JSON: sorted keys, no white space."""
    content = {key: value for key, value in record.items() if key != CHECKSUM_KEY}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def with_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of JSON values with its checksum added."""
    return {**record, CHECKSUM_KEY: checksum_of(record)}


def checksum_matches(record: dict[str, Any]) -> bool:
    """Return True if a record has a checksum that matches its content."""
    return record.get(CHECKSUM_KEY) == checksum_of(record)


_HEAD, _CELL = 32, 8
_EMPTY_CELL = bytes(_CELL)

# Size, times of the last change of the content and of the attributes in ns, and inode of a file. The second time cannot
# be set by programs: it shows a change after which the first one was put back.
FileStamp = tuple[int, int, int, int]


def file_stamp(path: Path) -> FileStamp:
    """Return the stamp of a file; DataError if stat fails."""
    try:
        stat = os.stat(path)  # noqa: PTH116 - in a third of the time of Path.stat, for each row that is read
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


class ContentRecord:
    """Record of the content of some files, given as (name for messages, size in bytes), in pages.

    Each of ``places`` is a file of the record; what one of them knows is compared with. Those that cannot be written
    are left out. Cells of another ``key`` or other sizes are dropped. ``remedy`` ends the message about a difference.
    """

    def __init__(
        self, places: Sequence[Path], files: Sequence[tuple[str, int]], page: int, key: str, remedy: str
    ) -> None:
        self._places, self._files, self._page, self._remedy = places, files, page, remedy
        counts = [-(-size // page) for _, size in files]
        self._first = [0, *accumulate(counts)]
        self._head = hashlib.sha256(json.dumps([key, page, [size for _, size in files]]).encode()).digest()
        self._compared: dict[int, tuple[FileStamp, bytearray]] = {}
        self._completed: dict[int, FileStamp] = {}  # so that a full disk does not let a file be read again and again

    @cached_property
    def _tables(self) -> list[int]:
        """Descriptors of the files of cells, opened on first use: a refused start has changed none."""
        tables = []
        for place in dict.fromkeys(self._places):
            with suppress(OSError):
                tables.append(_open_table(place, self._head))
        return tables

    def check(self, number: int, local: Path, start: int = 0, stop: int | None = None) -> None:
        """Compare or record pages of ``start <= byte < stop`` (None: the end); DataError if they differ."""
        stamp, size = file_stamp(local), self._files[number][1]
        known, bits = self._compared.get(number, (None, bytearray()))
        # A page that this process has compared is read again only if the stamp of the file has changed.
        if known != stamp:
            self._check_size(number, stamp)
            bits = bytearray((self._first[number + 1] - self._first[number]) // 8 + 1)
            self._compared[number] = (stamp, bits)
        last = (size if stop is None or stop > size else stop) - 1
        for page in range(start // self._page, last // self._page + 1):
            if not bits[page >> 3] >> (page & 7) & 1:
                for _, digest in self._digests(local, [page]):
                    self._compare(number, page, digest)
                bits[page >> 3] |= 1 << (page & 7)

    def complete(self, number: int, local: Path, sha256: str = "") -> None:  # sha256: of the complete file, if known
        """Compare or record all of a file, unless done at its present stamp; DataError if it differs."""
        stamp = file_stamp(local)
        if self._completed.get(number) == stamp:
            return
        cell = hashlib.sha256(json.dumps(stamp).encode()).digest()[:_CELL]
        complete = [table for table in self._tables if self._is_recorded(table, number, cell)]
        if len(complete) == len(self._tables) and (complete or not sha256):
            return
        self._check_size(number, stamp)
        first = self._first[number]
        pages = range(self._first[number + 1] - first)
        whole = hashlib.sha256()
        # From a record that knows all of it, if there is one: the file need not be read for the others.
        known = ((page, _read_cell(table, _HEAD + _CELL * (first + page))) for table in complete[:1] for page in pages)
        found = known if complete else self._digests(local, pages, whole)
        for page, digest in found:
            self._compare(number, page, digest)
        if sha256 and not complete and whole.hexdigest() != sha256:
            for table in self._tables:  # what was recorded is not what belongs there
                self._write(table, _HEAD + _CELL * first, bytes(_CELL * len(pages)))
            raise self._changed(number, "its checksum differs")
        if file_stamp(local) == stamp:  # else it was written meanwhile, and nobody knows what was read
            self._completed[number] = stamp
            for table in self._tables:
                self._write(table, self._stamp_offset(number), cell)

    def is_complete(self, number: int) -> bool:
        """Return True if all of a file was recorded once."""
        return any(self._is_recorded(table, number) for table in self._tables)

    def close(self) -> None:
        """Close the record. Closing it twice is harmless."""
        while self._tables:
            os.close(self._tables.pop())

    # --- cells -------------------------------------------------------------------------------------------------------

    def _compare(self, number: int, page: int, digest: bytes) -> None:
        if digest == _EMPTY_CELL:  # of another record, which knows nothing of the page
            return
        offset = _HEAD + _CELL * (self._first[number] + page)
        for table in self._tables:
            known = _read_cell(table, offset)
            if known == _EMPTY_CELL:
                self._write(table, offset, digest)
            elif known != digest:
                start, stop = page * self._page, min((page + 1) * self._page, self._files[number][1])
                raise self._changed(number, f"it differs within bytes {start:,} to {stop:,}")

    def _digests(
        self, local: Path, pages: Sequence[int], whole: "hashlib._Hash | None" = None
    ) -> Iterator[tuple[int, bytes]]:
        """Read pages, and yield their digests; all bytes are added to ``whole``."""
        if not pages:
            return
        with as_data_error(local), local.open("rb", buffering=0) as file:
            for page in pages:
                content = os.pread(file.fileno(), self._page, page * self._page)
                if whole is not None:
                    whole.update(content)
                yield page, hashlib.sha256(content).digest()[:_CELL]

    def _stamp_offset(self, number: int) -> int:
        return _HEAD + _CELL * (self._first[-1] + number)

    def _is_recorded(self, table: int, number: int, stamp: bytes = b"") -> bool:
        """Return True if a table has all pages of a file, at this stamp, or at any if it is empty."""
        known = _read_cell(table, self._stamp_offset(number))
        if known == _EMPTY_CELL or (stamp and known != stamp):
            return False
        import numpy as np  # noqa: PLC0415  (13 MB and threads; supervisors import this module, and fork)

        first, after = self._first[number : number + 2]  # on a full disk, the stamp may be all that was written
        cells = np.frombuffer(os.pread(table, _CELL * (after - first), _HEAD + _CELL * first), dtype=np.uint64)
        return bool(cells.all())

    @staticmethod
    def _write(table: int, offset: int, cell: bytes) -> None:
        with suppress(OSError):  # a full disk: the cell stays empty, and the page is recorded when it is read again
            os.pwrite(table, cell, offset)

    # --- errors ------------------------------------------------------------------------------------------------------

    def _check_size(self, number: int, stamp: FileStamp) -> None:
        if stamp[0] != self._files[number][1]:
            raise self._changed(number, f"it has {stamp[0]:,} bytes, and had {self._files[number][1]:,}")

    def _changed(self, number: int, how: str) -> DataError:
        return DataError(f"{self._files[number][0]}: the content of the file has changed: {how}. {self._remedy}")


def _open_table(place: Path, head: bytes) -> int:
    """Open a file of cells, emptied if it is that of other files."""
    try:
        table = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:  # a folder that cannot be written: what the record knows is still compared
        table = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(table, fcntl.LOCK_EX)
        # Under the lock: of several processes that find another record, only one empties it.
        if os.pread(table, _HEAD, 0) != head:
            os.ftruncate(table, 0)
            os.pwrite(table, head, 0)
        with suppress(OSError):
            fcntl.flock(table, fcntl.LOCK_UN)
    except BaseException:
        os.close(table)
        raise
    return table


def _read_cell(table: int, offset: int) -> bytes:
    """Read a cell; those after the end of the file are empty."""
    return os.pread(table, _CELL, offset).ljust(_CELL, b"\0")


@contextmanager
def as_data_error(path: str | Path) -> Iterator[None]:
    """Convert an OSError of reading a file into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
