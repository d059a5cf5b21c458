"""What a file is read into, and what is said of one that cannot be read.

Whatever is wrong with a file is a DataError that names the file, the place and the remedy. What is wrong with one row
comes out as a row without text that says so, since the rows after it can be read.
"""

import errno
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from hlat.data.formats.decompression import DamagedStream
from hlat.data.formats.document import Content
from hlat.data.formats.file_types import file_type
from hlat.runtime import DataError, visible_name

SET_TEXT_COLUMN = "Set data.text_column to one of these."
_NAMES = 20  # names of columns that a message lists


class RowError(NamedTuple):
    """Why a row cannot be read.

    Attributes:
        line: line of the file that the row is, from 1; None where rows are not lines.
        reason: what is wrong.
        remedy: what would put it right, a sentence.
    """

    line: int | None
    reason: str
    remedy: str


class Row(NamedTuple):
    """One document of a file.

    Attributes:
        row: its index in the file, from 0.
        content: the text, or tokens of a file of tokens; None where the column holds null, or where the row cannot be
            read.
        position: bytes of the file read so far, about, for progress.
        error: why the row cannot be read; None where it can.
    """

    row: int
    content: Content | None
    position: int
    error: RowError | None = None


def make_row(row: int, text: str | RowError | None, position: int) -> Row:
    """A row that could be read, or could not."""
    return Row(row, None, position, text) if isinstance(text, RowError) else Row(row, text, position)


@contextmanager
def convert_file_errors(file: Path) -> Iterator[None]:
    """What reading libraries raise about a file, as DataError."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{file}: no such file") from error
    except PermissionError as error:
        raise DataError(f"{file}: permission denied; make the file readable") from error
    except (EOFError, zlib.error, gzip.BadGzipFile, DamagedStream) as error:
        raise _damaged(file, "the compressed data", error) from error
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise DataError(f"{file}: {error.strerror}. Raise the limit (ulimit -n), and run again.") from error
        raise _damaged(file, f"the {file_type(file)} file", error) from error


def _damaged(file: Path, what: str, error: object) -> DataError:
    reason = str(error).strip().rstrip(".").splitlines()[0] if str(error).strip() else type(error).__name__
    return DataError(
        f"{file}: {what} cannot be read to its end: {reason}. It is truncated or damaged: "
        "fetch or write the file again."
    )


def missing_column(column: str, names: list[str]) -> str:
    """That there is no column of this name, and which there are."""
    known = ", ".join(escape_name(name) for name in names[:_NAMES])
    return f"no column {column!r}; it has {known or 'none'}{', ...' if len(names) > _NAMES else ''}"
