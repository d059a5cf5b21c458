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
from hlat.data.formats.streams.decompression import DamagedStream, LongWindowError
from hlat.runtime.errors import DataError
from hlat.runtime.terminal_text import escape_name

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
        DataError: the file is missing, unreadable, damaged or truncated, or the library or the disk refuses it.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{file}: no such file") from error
    except PermissionError as error:
        raise DataError(f"{file}: permission denied; make the file readable") from error
    except (EOFError, zlib.error, DamagedStream, LongWindowError, pa.ArrowException, OSError) as error:
        raise _unreadable(file, kind, error) from error


_APPENDED = ("Not a gzipped file", "Unknown frame descriptor")
"""What the libraries say of bytes after the end of compressed data; the beginning was checked before."""


def _unreadable(file: Path, kind: str, error: Exception) -> DataError:
    """Return the error of a file that a library cannot read: damaged, unless the library or the disk is the reason."""
    reason = str(error).strip().rstrip(".").splitlines()[0] if str(error).strip() else type(error).__name__
    again = "It is truncated or damaged: fetch or write the file again."
    match error:
        case LongWindowError():
            reason = "compressed with a window of more than 128 MiB (zstd --long), which hlat does not read"
            again = "The file may be whole. Write it with a smaller one: zstd -d --long=31 -c FILE | zstd -o NEW.zst."
        case EOFError() | zlib.error() | gzip.BadGzipFile() | DamagedStream():
            if any(words in str(error) for words in _APPENDED):
                reason = f"other bytes follow the compressed data: {reason}"
                again = "Remove them: decompress the file (gzip and zstd warn of the rest), and compress it again."
            else:
                reason = f"the compressed data cannot be read to its end: {reason}"
        case pa.ArrowNotImplementedError() | MemoryError():
            reason = f"the {kind} file cannot be read: {reason}"
            again = "It need not be damaged: write it in a usual way (zstd or snappy, smaller row groups)."
        case OSError(errno=errno.EMFILE | errno.ENFILE):
            return DataError(f"{file}: {error.strerror}. Raise the limit (ulimit -n), and run again.")
        case OSError(errno=int()):
            reason, again = f"cannot be read: {error.strerror}", "See to the disk or the network, and run again."
        case _:
            reason = f"the {kind} file cannot be read to its end: {reason}"
    return DataError(f"{file}: {reason}. {again}")


def missing_column(column: str, names: list[str]) -> str:
    """Describe, for messages, that there is no column of this name, and list the columns."""
    known = ", ".join(escape_name(name) for name in names[:_MAX_NAMES])
    return f"no column {column!r}; it has {known or 'none'}{', ...' if len(names) > _MAX_NAMES else ''}"


def same_columns(column: str, count: int) -> str:
    """Describe, for messages, that several columns have the name of the documents', and what would work."""
    return f"{count} columns are called {column!r}. Rename them."
