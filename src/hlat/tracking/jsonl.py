"""JSON lines files: one record per line, appended atomically, readable even if the writer was killed.

    record -> one line -> one write() -> file

A line is valid if it ends with a newline and parses. A half-written line of a killed writer is cut off before the next
record. If the disk is full, the file stays as it was before the record, and an error is raised. Several processes may
append to one file, as a run and its supervisor do: each record, and each repair, is written under a lock.
"""

import errno
import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from hlat.runtime.errors import DataError, StorageError
from hlat.runtime.logs import AppendedFile
from hlat.runtime.progress import blocking_call
from hlat.runtime.storage.local_files import atomic_file

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TAIL_BLOCK = 1 << 16
_PATIENCE = 5.0  # seconds to wait for another writer; one that was stopped while writing must not block the others
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def as_storage_error(path: Path, action: str) -> Iterator[None]:
    """Turn an OSError inside the block into a StorageError that names the file and a remedy."""
    try:
        # A wait for the disk is no hang, however long it takes.
        with blocking_call():
            yield
    except OSError as error:
        remedy = "Free space on that disk, or name another folder with run.dir, and start again: the run resumes."
        raise StorageError(f"{path}: cannot {action}: {error.strerror or error}. {remedy}") from error


def encode(record: dict[str, Any]) -> bytes:
    """Encode a record as a line of strict JSON. Floats keep every bit; NaN and the infinities become strings."""
    return json.dumps(to_json_value(record), allow_nan=False).encode("ascii") + b"\n"


def decode_record(line: bytes) -> dict[str, Any] | None:
    """Decode a line; return None if it is not a complete JSON object."""
    try:
        record = from_json(line)  # the same values as json.loads in a third of the time: a run reads a million lines
    except ValueError:
        try:
            record = json.loads(line)  # has fewer rules: characters that are half of a pair, as in names of files
        except (ValueError, RecursionError):  # RecursionError: deeply nested brackets
            return None
    return record if isinstance(record, dict) else None


def to_json_value(value: Any) -> Any:
    """Convert a value to strict JSON: NaN and the infinities become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    return value


def from_json_value(value: Any) -> Any:
    """Convert the strings of ``to_json_value`` back to NaN and the infinities; only for records without other text."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):  # numbers are passed by here: files have millions of them
        return {key: item if type(item) is float else from_json_value(item) for key, item in value.items()}
    return value


def flat_fields(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to values by dotted name; an empty one is a value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat_fields(value, f"{prefix}{name}.")
        else:
            found[sys.intern(prefix + name)] = value  # one text per name: files have millions of values
    return found


class JsonLines:
    """JSON lines file in an existing folder, opened for appending. Closing it twice is harmless.

    Raises:
        StorageError: the file cannot be opened, repaired or written; its complete lines stay as they were.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._move = ""
        with as_storage_error(path, "open"):
            self._file = AppendedFile(path)
        try:
            with as_storage_error(path, "repair"), _exclusive(self._file.descriptor):
                self._repair(self._file.descriptor)
        except StorageError:
            self.close()
            raise

    def append(self, record: dict[str, Any]) -> None:
        """Append one record; the file contains it completely when this returns."""
        assert self._file.descriptor >= 0, "append() after close()"
        line = encode(record)
        with as_storage_error(self.path, "write"):
            while move := self._append_here(line):
                self._move = move

    def follow(self) -> None:
        """Open the file under its name again if it is another one, as ``append`` does."""
        with as_storage_error(self.path, "open"), _exclusive(self._file.descriptor):
            self._move = self._file.follow() or self._move

    def _append_here(self, line: bytes) -> str:
        """Append a line; or, if the file had to be opened again, write nothing and return how."""
        descriptor = os.dup(self._file.descriptor)  # keeps the lock until the content of a moved file is copied
        try:
            with _exclusive(descriptor):
                if move := self._file.follow():
                    return move
                self._repair(descriptor)
                before = os.fstat(descriptor).st_size
                try:
                    written = 0
                    while written < len(line):
                        written += os.write(descriptor, line[written:])
                except OSError:
                    with suppress(OSError):  # report the first error; the next open repairs the rest
                        os.ftruncate(descriptor, before)
                    raise
                return ""
        finally:
            os.close(descriptor)

    def last_move(self) -> str:
        """Return, and forget, what was done if the file was renamed, removed or replaced."""
        move, self._move = self._move, ""
        return move

    def sync(self) -> None:
        """Make every record so far survive a power failure."""
        assert self._file.descriptor >= 0, "sync() after close()"
        with as_storage_error(self.path, "flush"):
            os.fsync(self._file.descriptor)

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def _repair(descriptor: int) -> None:
        """Cut off an incomplete last line; if only its newline is missing, add it."""
        size = os.fstat(descriptor).st_size
        if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
            return
        start = _last_newline(descriptor, size) + 1
        tail = os.pread(descriptor, size - start, start)
        if decode_record(tail) is not None:
            os.write(descriptor, b"\n")
        else:
            # A writer was killed within the record: half of it is worth nothing.
            os.ftruncate(descriptor, start)


@contextmanager
def _exclusive(descriptor: int) -> Iterator[None]:
    # Without the lock after a while: a writer that was stopped must not block the others.
    deadline, locked = time.monotonic() + _PATIENCE, False
    while not locked and time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            time.sleep(0.001)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            break
    try:
        yield
    finally:
        if locked:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _last_newline(descriptor: int, size: int) -> int:
    # Searched backwards, because files grow for months.
    end = size
    while end > 0:
        begin = max(0, end - _TAIL_BLOCK)
        found = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found
        end = begin
    return -1


def iter_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield records in order, without keeping them; DataError names a damaged line, unless it is the last."""
    for number, (line, record) in enumerate(_decoded_lines(path), start=1):
        if record is None:
            shown = line[:60].rstrip(b"\n").decode("utf-8", errors="backslashreplace")
            raise DataError(f"{path}, line {number}: {shown!r} is not a JSON object. Correct or delete that line.")
        yield record


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return every record of a file; raises as ``iter_records``."""
    return list(iter_records(path))


def iter_valid_records(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield each line's record, in order; None for a damaged line. A missing file has none."""
    if path.is_file():
        yield from (record for _, record in _decoded_lines(path))


def read_valid_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of the lines that can be read, and the number of the others."""
    decoded = list(iter_valid_records(path))
    return [record for record in decoded if record is not None], decoded.count(None)


def _decoded_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    with as_storage_error(path, "read"), path.open("rb") as lines:
        for line in lines:
            # The last line counts only if it is whole: a run may be writing it.
            record = decode_record(line)
            if record is not None or line.endswith(b"\n"):
                yield line, record


def filter_lines(path: Path, keep: Callable[[bytes], bool]) -> None:
    """Keep only the lines for which ``keep`` is True. Atomic: a crash leaves either the old file or the new one.

    Raises:
        StorageError: the new file could not be written; the old one is unchanged, and no other file is left.
    """
    with as_storage_error(path, "rewrite"):
        for rest in path.parent.glob(f"{path.name}.*.tmp"):  # of a killed process: only the run's own writes the file
            rest.unlink(missing_ok=True)
        with path.open("rb") as lines, atomic_file(path, sync_folder=True) as out:
            out.writelines(line for line in lines if keep(line))
