"""Rows of a file, and the errors of files and rows that cannot be read.

A problem of a file raises a DataError that names the file, the position and a remedy. A problem of one row is returned
as a row without content and with an error, because the rows after it can be read.
"""

import errno
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from hlat.data.formats.document import Content, Vocabulary
from hlat.data.formats.streams import DamagedStream
from hlat.runtime import DataError, escape_name

_MAX_NAMES = 20  # column names that a message lists


class InputFile(NamedTuple):
    """A local file, and everything that reading its documents may need.

    Attributes:
        path: the file.
        column: column or key of its documents; ignored by formats without columns.
        vocabulary: vocabulary of the given tokenizer; None if the tokenizer is trained on the corpus.
        companion: the file that belongs to it, for formats of two files; None for the one next to it.
        stays: True for a file of the user, which may be kept open; False for one that a cache has to delete.
    """

    path: Path
    column: str
    vocabulary: Vocabulary | None = None
    companion: Path | None = None
    stays: bool = True

    @property
    def known_ids(self) -> Vocabulary:
        """The vocabulary, for a file of tokens."""
        assert self.vocabulary is not None, "files of tokens are refused unless a tokenizer is given"
        return self.vocabulary


class RowError(NamedTuple):
    """Problem of a bad row, which cannot be read.

    Attributes:
        line: line number of the row in the file, from 1; None if rows are not lines.
        reason: the problem.
        remedy: a sentence that says how to fix it.
    """

    line: int | None
    reason: str
    remedy: str


class Row(NamedTuple):
    """One document of a file.

    Attributes:
        row: index in the file, from 0.
        content: the text, or the tokens if the file contains tokens; None if the column is null or the row is bad.
        position: approximate number of bytes of the file read so far, for progress.
        error: the problem of a bad row; None for a good row.
    """

    row: int
    content: Content | None
    position: int
    error: RowError | None = None


def make_row(row: int, content: Content | RowError | None, position: int) -> Row:
    """Make a row from its content, or a bad row from an error."""
    return Row(row, None, position, content) if isinstance(content, RowError) else Row(row, content, position)


@contextmanager
def convert_file_errors(file: Path, kind: str) -> Iterator[None]:
    """Convert exceptions of the reading libraries into a DataError that names the file.

    Args:
        file: the file.
        kind: its format, for messages.

    Raises:
        DataError: the file is missing, unreadable, damaged or truncated, or too many files are open.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{file}: no such file") from error
    except PermissionError as error:
        raise DataError(f"{file}: permission denied; make the file readable") from error
    except (EOFError, zlib.error, gzip.BadGzipFile, DamagedStream) as error:
        raise _misnamed(file) or _damaged(file, "the compressed data", error) from error
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise DataError(f"{file}: {error.strerror}. Raise the limit (ulimit -n), and run again.") from error
        raise _misnamed(file) or _damaged(file, f"the {kind} file", error) from error


_BEGINNINGS = {
    ".gz": b"\x1f\x8b",
    ".zst": b"\x28\xb5\x2f\xfd",
    ".bz2": b"BZh",
    ".xz": b"\xfd7zXZ\x00",
    ".parquet": b"PAR1",
    ".zip": b"PK\x03\x04",
}
"""The bytes with which files of an ending begin."""


def _misnamed(file: Path) -> DataError | None:
    """Return the error of a file that is no file of its ending at all; None for one that begins as such a file does."""
    expected = _BEGINNINGS.get(ending := file.suffix.lower())
    try:
        with file.open("rb") as opened:
            begins = opened.read(8)
    except OSError:
        return None
    if expected is None or begins.startswith(expected) or not begins.strip(b"\0"):
        return None
    is_like = [other for other, first in _BEGINNINGS.items() if begins.startswith(first)]
    found = f"a {is_like[0]} file" if is_like else "plain text" if begins.isascii() else "something else"
    return DataError(
        f"{file}: the file is not what its ending {ending} says: it begins like {found}. Give it the ending of what it "
        "is, or fetch it again."
    )


def _damaged(file: Path, what: str, error: object) -> DataError:
    reason = str(error).strip().rstrip(".").splitlines()[0] if str(error).strip() else type(error).__name__
    return DataError(
        f"{file}: {what} cannot be read to its end: {reason}. It is truncated or damaged: "
        "fetch or write the file again."
    )


def missing_column(column: str, names: list[str]) -> str:
    """Describe, for messages, that there is no column of this name, and list the columns."""
    known = ", ".join(escape_name(name) for name in names[:_MAX_NAMES])
    return f"no column {column!r}; it has {known or 'none'}{', ...' if len(names) > _MAX_NAMES else ''}"
