"""JSON lines on disk: one record per line, appended whole, readable whatever killed the writer.

    record -> one line -> one write() -> file

A line exists if it ends with a newline and parses. What a killed writer leaves half-written is cut off before the next
record. A full disk leaves the file as it was before the record, and says so. Several processes may append to one file,
as a run and its supervisor do: each record, and each repair, is made under a lock.
"""

import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hlat.runtime import DataError, StorageError
from hlat.runtime.storage import sync_to_disk

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TAIL_BLOCK = 1 << 16
_PATIENCE = 5.0  # seconds for another writer to finish; one that was stopped in the midst of it must stop nobody else
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def storage_errors(path: Path, action: str) -> Iterator[None]:
    """Turn an OSError of this block into a StorageError that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        remedy = "Free space on that disk, or name another folder with run.dir, and start again: the run resumes."
        raise StorageError(f"{path}: cannot {action}: {error.strerror or error}. {remedy}") from error


def encode(record: dict[str, Any]) -> bytes:
    """One line of strict JSON. Floats keep every bit; NaN and the infinities, which JSON lacks, become strings."""
    return json.dumps(expressible(record), allow_nan=False).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None if it is not a whole JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # the latter of a line of brackets
        return None
    return record if isinstance(record, dict) else None


def expressible(value: Any) -> Any:
    """A value as strict JSON can hold it: NaN and the infinities become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: expressible(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [expressible(item) for item in value]
    return value


def with_non_finite(value: Any) -> Any:
    """The inverse of what ``expressible`` does to NaN and the infinities, for records whose strings are never names."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: with_non_finite(item) for key, item in value.items()}
    return value


class JsonLines:
    """A file of JSON lines in a folder that exists, opened for appending. Closing it twice is harmless.

    Raises:
        StorageError: the file cannot be opened, repaired or written; its whole lines are left as they were.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage_errors(path, "open"):
            self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            with storage_errors(path, "repair"), _exclusive(self._descriptor):
                self._repair(self._descriptor)
        except StorageError:
            self.close()
            raise

    def append(self, record: dict[str, Any]) -> None:
        """Add one record; it is in the file, whole, when this returns."""
        assert self._descriptor is not None, "append() after close()"
        line = encode(record)
        with storage_errors(self.path, "write"), _exclusive(self._descriptor):
            self._repair(self._descriptor)
            before = os.fstat(self._descriptor).st_size
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._descriptor, line[written:])
            except OSError:
                with suppress(OSError):  # the first error is the one to report; opening repairs what stays behind
                    os.ftruncate(self._descriptor, before)
                raise

    def sync(self) -> None:
        """Wait until every record so far would survive a power cut."""
        assert self._descriptor is not None, "sync() after close()"
        with storage_errors(self.path, "flush"):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _repair(descriptor: int) -> None:
        """Cut off a last line that is not whole; give one that lacks only its newline that newline."""
        size = os.fstat(descriptor).st_size
        if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
            return
        start = _last_newline(descriptor, size) + 1
        tail = os.pread(descriptor, size - start, start)
        if decode(tail) is not None:
            os.write(descriptor, b"\n")
        else:
            os.ftruncate(descriptor, start)


@contextmanager
def _exclusive(descriptor: int) -> Iterator[None]:
    """Keep other writers out; without a lock where the file system has none, or one holds it for too long."""
    deadline, held = time.monotonic() + _PATIENCE, False
    while not held and time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            time.sleep(0.001)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            break
    try:
        yield
    finally:
        if held:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _last_newline(descriptor: int, size: int) -> int:
    """Offset of the last newline, or -1; read backwards, because a file grows for months."""
    end = size
    while end > 0:
        begin = max(0, end - _TAIL_BLOCK)
        found = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found
        end = begin
    return -1


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every record of a file, in order. A half-written last line, of a writer at work or killed, is ignored.

    Raises:
        DataError: another line is not a JSON object; the message names it.
        StorageError: the file cannot be read.
    """
    with storage_errors(path, "read"):
        *whole, tail = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(whole, start=1):
        record = decode(line)
        if record is None:
            shown = line[:60].decode("utf-8", errors="backslashreplace")
            raise DataError(f"{path}, line {number}: {shown!r} is not a JSON object. Correct or delete that line.")
        records.append(record)
    last = decode(tail)
    return records if last is None else [*records, last]


def keep_lines(path: Path, keep: Callable[[bytes], bool]) -> None:
    """Drop every line that ``keep`` refuses, all at once: a crash leaves either the old file or the new one.

    Raises:
        StorageError: the new file could not be written; the old one is unchanged and nothing else is left.
    """
    new = path.with_name(path.name + ".tmp")
    with storage_errors(path, "rewrite"):
        try:
            with path.open("rb") as lines, new.open("wb") as out:
                out.writelines(line for line in lines if keep(line))
                out.flush()
                os.fsync(out.fileno())
            new.replace(path)
            sync_to_disk(path.parent)
        finally:
            new.unlink(missing_ok=True)
