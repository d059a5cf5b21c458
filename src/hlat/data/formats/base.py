"""The protocol of a file format: everything that hlat needs to know about one kind of file.

    endings           file names --> format (hlat.data.formats.registry)
    documents         a file --> its rows, from any row on            (preparation)
    ranges            a file --> parts that can be opened alone       (reading while the model trains)
    range_reader      a part --> its rows
    address           a bad row --> its position, for messages

    bytes of a file        --> ranges of bytes, of equal length
    rows of a row group    --> ranges of rows, of about equal bytes

A format is one class in one file of this folder, and one line of the registry. Nothing else knows which formats there
are. The defaults below are those of a file that has rows and can only be read from its beginning.

A range is a part of a file that can be read without what precedes it. A stream of samples reads ranges from all over
the corpus, so a range is small compared with the corpus.
"""

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from hlat.data.formats.rows import ColumnKind, InputFile, Row, RowError, convert_file_errors
from hlat.data.formats.streams import Stream, is_compressed, is_other_content, open_decompressed
from hlat.runtime.errors import DataError
from hlat.runtime.storage.local_files import HEAD_BYTES, recognize

WHOLE = -1
"""Value of ``stop`` for a range that is a complete file."""


class FileRange(NamedTuple):
    """A part of a file.

    Attributes:
        start: first row, document or byte, as the format counts.
        stop: end of the range, exclusive; ``WHOLE`` (-1) for the complete file.
    """

    start: int
    stop: int


WHOLE_FILE = FileRange(0, WHOLE)


class RangeReader(Protocol):
    """Reads ranges of the files of one format, and may keep what it had to decode for them."""

    def rows(self, file: InputFile, part: FileRange, row: int) -> Iterator[Row]:
        """Yield the rows of a range from its ``row``-th on, numbered from the beginning of the range.

        Raises:
            DataError: the file is missing, damaged or truncated, or has no column of this name.
        """


def byte_ranges(total: int, size: int) -> Iterator[FileRange]:
    """Yield ranges of about ``size`` bytes that cover ``total`` bytes."""
    count = max(-(-total // size), 1)
    edges = [total * number // count for number in range(count + 1)]
    yield from (FileRange(start, stop) for start, stop in pairwise(edges))


def group_ranges(groups: Iterable[tuple[int, int]], size: int) -> Iterator[FileRange]:
    """Yield ranges of the rows of groups, dividing groups that are larger than ``size`` bytes.

    Args:
        groups: number of rows, and of bytes, of each group.
        size: approximate bytes per range.
    """
    first = 0
    for rows, total in groups:
        count = min(max(-(-total // size), 1), max(rows, 1))
        edges = [first + rows * number // count for number in range(count + 1)]
        yield from (FileRange(start, stop) for start, stop in pairwise(edges) if stop > start)
        first += rows


def cut_rows(rows: Iterator[Row], part: FileRange) -> Iterator[Row]:
    """Yield the rows of a file up to the end of a range, numbered from its beginning."""
    for row in rows:
        if row.row >= part.stop:
            return
        yield row._replace(row=row.row - part.start)


class Companion(NamedTuple):
    """The second file of a format whose documents are two files with the same name.

    Attributes:
        main: ending of the file that a corpus lists.
        ending: ending of the file that belongs to it.
        path: returns the path or name of the second file of a first one.
        rule: a sentence about the two, for messages, without its full stop.
    """

    main: str
    ending: str
    path: Callable[[str], str]
    rule: str


class FileFormat(ABC):
    """One kind of file.

    Attributes:
        kind: the word for such files in messages.
        endings: endings of their names, lower-case with the dot, without an ending for compression.
        compressible: True if files may also be compressed with gzip or zstd.
        column: kind of the column that holds the documents; None if the format has no columns.
        is_one_document: True if a file is one document; it has no rows, and an empty file is an empty document.
        companion: the second file of such a file; None if there is none.
    """

    kind: ClassVar[str]
    endings: ClassVar[tuple[str, ...]] = ()
    compressible: ClassVar[bool] = False
    is_one_document: ClassVar[bool] = False
    companion: ClassVar[Companion | None] = None
    column: ColumnKind | None = None

    @property
    def name(self) -> str:
        """Name of the format in records; no two formats have the same."""
        return f"{self.kind}{'' if self.column is None else self.column.name_suffix}"

    @property
    def holds_tokens(self) -> bool:
        """True if the documents are token ids."""
        return self.column is not None and self.column.holds_tokens

    def accepts(self, column: ColumnKind) -> bool:
        """Return True if a source that names a column of this kind may have files of this format.

        A format without columns ignores the name, unless it holds text and the column is one of tokens.
        """
        return self.column is column or (self.column is None and column.holds_tokens <= self.holds_tokens)

    def check(self, path: Path) -> None:
        """Check what the size and the first bytes of a file say.

        Raises:
            DataError: it cannot be a file of this format.
            OSError: it cannot be accessed.
        """
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty (0 bytes). Write it again, or leave it out of the source.")
        self.check_head(path, self.read_head(path))

    def check_head(self, path: Path, head: bytes) -> None:
        """Check the first bytes of a file, decompressed; raise DataError if no file of this format has them."""
        if not self.is_own_content(head):
            raise _other_content(path, head)

    def is_own_content(self, head: bytes) -> bool:
        """Return True if a file of this format may begin with these bytes; unless a format says more, any text."""
        return recognize(head) is None

    def read_head(self, path: Path) -> bytes:
        """Return the first bytes of a file, decompressed.

        Raises:
            DataError: it is not compressed as its ending says.
        """
        with path.open("rb") as raw:
            return self.open_checked(path, raw).read(HEAD_BYTES)

    def open_checked(self, path: Path, raw: io.BufferedReader) -> Stream:
        """Return a stream of the decompressed content of a file that was just opened; raise as ``read_head``."""
        if self.compressible and is_compressed(path):
            head = raw.read(HEAD_BYTES)
            if head and is_other_content(path, head):
                raise _other_content(path, head)
            raw.seek(0)
            return open_decompressed(path, raw)
        return raw

    def bad_beginning(self, path: Path) -> RowError | None:
        """Check a file by its first bytes; return their problem if the file is a document, and so a row that is bad.

        Raises:
            DataError: it is no file of this format, or cannot be read.
        """
        with convert_file_errors(path, self.kind):
            self.check(path)
        return None

    def documents(self, file: InputFile, start: int = 0) -> Iterator[Row]:
        """Yield the documents of a file from row ``start`` on, in order.

        Memory is bounded by one document and one batch of rows. Nothing is skipped silently: a null is a row with
        content None, which the caller counts.

        Raises:
            DataError: the file is missing, empty, damaged or truncated, or has no column of this name. Problems of a
                single row are returned in ``Row.error``.
        """
        with convert_file_errors(file.path, self.kind):
            self.check(file.path)
            yield from self._read(file, start)

    @abstractmethod
    def _read(self, file: InputFile, start: int) -> Iterator[Row]:
        """Yield the documents of a file from row ``start`` on; errors of the libraries are passed on."""

    def ranges(self, file: InputFile, size: int) -> Iterator[FileRange]:
        """Yield the ranges of a file, in order.

        Args:
            file: the file; its vocabulary may be None.
            size: approximate bytes per range.

        Raises:
            OSError: the file cannot be read.
            pyarrow.ArrowException: the file is damaged.
            DataError: as ``documents``.
        """
        del file, size
        yield WHOLE_FILE

    def remote_ranges(self, path: Path, total: int, size: int) -> Iterator[FileRange]:
        """Yield the ranges of a file that is not fetched.

        Args:
            path: the end of its URL.
            total: its size in bytes.
            size: approximate bytes per range.
        """
        del path, total, size
        yield WHOLE_FILE

    def range_reader(self) -> RangeReader:
        """Return a reader of ranges other than complete files."""
        return _RowRangeReader(self)

    def bytes_of(self, file: InputFile, part: FileRange) -> tuple[int, int | None] | None:
        """Return the first byte of a range, and the end of its bytes; None for an end stands for that of the file.

        None is returned for a range that is not known to be in a part of the file, and for a file of many rows that is
        one range, such as a compressed one: reading its first row should not take as long as reading all of it. Rows
        that begin in the range may go on after it.
        """
        del file
        return (0, None) if part == WHOLE_FILE and self.is_one_document else None

    def address(self, row: int, line: int | None, position: int) -> str:
        """Return the position of a bad row in its file, for messages; empty if the file is one document.

        Args:
            row: index of the row: in the file, or, if ranges are not rows, in its range.
            line: its line number, from 1; None if unknown.
            position: byte of the file at which it ends, approximately; only for formats whose ranges are bytes.
        """
        del position
        return f", row {row}" if line is None else f", line {line}"

    def doubt(self, paths: Sequence[Path]) -> str:
        """Return a sentence if the local files of a source seem to hold less than they should, or an empty string."""
        del paths
        return ""

    def folder_files(self, names: Sequence[str], read: Callable[[str], bytes]) -> list[str] | None:
        """Return the files of a folder that is one data set of this format, in order; None if it is not one.

        Args:
            names: paths of all its files, relative to the folder, with "/".
            read: returns the content of a small file.

        Raises:
            DataError: it is one, but cannot be read; the message continues the name of the folder.
        """
        del names, read
        return None


def _other_content(path: Path, head: bytes) -> DataError:
    """Return the error of a file that is no file of its ending."""
    found = recognize(head)
    what = found.what if found else "plain text" if head.isascii() else "something else"
    remedy = found.remedy if found else f"Give it the ending of what it is, without {path.suffix}, or fetch it again."
    return DataError(f"{path}: the file is not what its ending {path.suffix} says: it begins like {what}. {remedy}")


class _RowRangeReader:
    """Reader of ranges of rows for formats that can begin at any row.

    Args:
        file_format: the format.
    """

    def __init__(self, file_format: FileFormat) -> None:
        self._format = file_format

    def rows(self, file: InputFile, part: FileRange, row: int) -> Iterator[Row]:
        return cut_rows(self._format.documents(file, part.start + row), part)
