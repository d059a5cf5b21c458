"""The protocol of a file format: everything that hlat needs to know about one kind of file.

    endings           file names --> format (hlat.data.formats.registry)
    documents         a file --> its rows, from any row on            (preparation)
    ranges            a file --> parts that can be opened alone       (reading while the model trains)
    range_reader      a part --> its rows
    address           a bad row --> its position, for messages

    bytes of a file        --> ranges of bytes, of equal length
    rows of a row group    --> ranges of rows, of about equal bytes

A format is one class in this folder, and one line of the registry, or a class of the user's own in ``data.formats``.
Nothing else knows which formats there are. The defaults below are those of a file that has rows and can only be read
from its beginning.

A range is a part of a file that can be read without what precedes it. Samples come from ranges all over the corpus, so
a range is small compared with the corpus.
"""

import io
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hlat.data.documents import Content
from hlat.data.formats.rows import ColumnKind, InputFile, Row, RowError, convert_file_errors, make_row
from hlat.data.formats.streams import (
    MAX_LINE_BYTES,
    Record,
    Stream,
    describe_expansion,
    is_compressed,
    is_other_content,
    open_decompressed,
    skip_line,
)
from hlat.runtime.errors import DataError
from hlat.runtime.storage.local_files import HEAD_BYTES, recognize

WHOLE = -1  # value of ``stop`` for a range that is a complete file


class FileRange(NamedTuple):
    """A part of a file that can be read alone."""

    start: int  # first row, document or byte, as the format counts
    stop: int  # end of the range, exclusive; ``WHOLE`` (-1) for the complete file


WHOLE_FILE = FileRange(0, WHOLE)


# Yields the rows of a range from a number on, counted from the beginning of the range; DataError if the file is
# missing, damaged or truncated, or has no column of this name. It may keep what it had to decode.
RangeReader = Callable[[InputFile, FileRange, int], Iterator[Row]]


def byte_ranges(total: int, size: int) -> Iterator[FileRange]:
    """Yield ranges of about ``size`` bytes that cover ``total`` bytes."""
    count = max(-(-total // size), 1)
    edges = [total * number // count for number in range(count + 1)]
    yield from (FileRange(start, stop) for start, stop in pairwise(edges))


def group_ranges(groups: Iterable[tuple[int, int]], size: int) -> Iterator[FileRange]:
    """Yield ranges of rows of about ``size`` bytes; ``groups`` are (rows, bytes), each cut by itself."""
    first = 0
    for rows, total in groups:
        # A row is never cut, so there are at most as many ranges as rows.
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
    """The second file of a format whose documents are two files with the same name."""

    main: str  # ending of the file that a corpus lists
    ending: str  # ending of the file that belongs to it
    path: Callable[[str], str]  # returns the path or name of the second file of a first one
    rule: str  # a sentence about the two, for messages, without its full stop


class FileFormat(ABC):
    """One kind of file; subclass it to add a format."""

    kind: ClassVar[str]  # the word for such files in messages
    # Endings of their names, lower-case with the dot, without an ending for compression.
    endings: ClassVar[tuple[str, ...]] = ()
    compressible: ClassVar[bool] = False  # True if files may also be compressed with gzip or zstd
    # True if a file is one document; it has no rows, and an empty file is an empty document.
    is_one_document: ClassVar[bool] = False
    # The file that belongs to each file of this format; None if there is none.
    companion: ClassVar[Companion | None] = None
    column: ColumnKind | None = None  # kind of the column that holds the documents; None if the format has no columns
    own_name: str = ""  # name of a format of the user's own in recipes; empty for hlat's

    @property
    def name(self) -> str:
        """Name of the format in records; no two formats have the same."""
        return self.own_name or f"{self.kind}{'' if self.column is None else self.column.name_suffix}"

    @property
    def holds_tokens(self) -> bool:
        """True if the documents are token ids."""
        return self.column is not None and self.column.holds_tokens

    def accepts(self, column: ColumnKind) -> bool:
        """Return True if a source that names a column of this kind may have files of this format."""
        # A format without columns ignores the name, unless it holds text and the column is one of tokens.
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
        """Raise DataError if no file of this format has these first bytes, decompressed."""
        if not self.is_own_content(head):
            raise _other_content(path, head)

    def is_own_content(self, head: bytes) -> bool:
        """Return True if a file of this format may begin with these bytes; by default any text."""
        return recognize(head) is None

    def read_head(self, path: Path) -> bytes:
        """Return the first bytes, decompressed; DataError if not compressed as the ending says."""
        with path.open("rb") as raw:
            return self.open_checked(path, raw).read(HEAD_BYTES)

    def open_checked(self, path: Path, raw: io.BufferedReader) -> Stream:
        """Return a stream of the decompressed content of an opened file; raise as ``read_head``."""
        if self.compressible and is_compressed(path):
            head = raw.read(HEAD_BYTES)
            if head and is_other_content(path, head):
                raise _other_content(path, head)
            raw.seek(0)
            return open_decompressed(path, raw)
        return raw

    def bad_beginning(self, path: Path) -> RowError | None:
        """Return the problem that the first bytes show, of a file that is one document and so one bad row.

        Raises:
            DataError: it is no file of this format, or cannot be read.
        """
        with convert_file_errors(path, self.kind):
            self.check(path)
        return None

    def documents(self, file: InputFile, start: int = 0) -> Iterator[Row]:
        """Yield the documents of a file from row ``start`` on, in order, one batch in memory.

        A null is a row with content None. DataError if the file is missing, empty, damaged or truncated, or has no such
        column; the problem of a single row is its ``Row.error``.
        """
        with convert_file_errors(file.path, self.kind):
            self.check(file.path)
            yield from self._read(file, start)

    @abstractmethod
    def _read(self, file: InputFile, start: int) -> Iterator[Row]:
        """Yield the documents from row ``start`` on; errors of the libraries are passed on."""

    def ranges(self, file: InputFile, size: int) -> Iterator[FileRange]:
        """Yield the ranges of a file, of about ``size`` bytes, in order; the file's vocabulary may be None.

        Raises:
            OSError: the file cannot be read.
            pyarrow.ArrowException: the file is damaged.
            DataError: as ``documents``.
        """
        yield WHOLE_FILE

    def remote_ranges(self, path: Path, total: int, size: int) -> Iterator[FileRange]:
        """Yield the ranges of a file that is not fetched, from its name and ``total`` bytes."""
        yield WHOLE_FILE

    def range_reader(self) -> RangeReader:
        """Return a reader of ranges other than complete files."""
        return lambda file, part, row: cut_rows(self.documents(file, part.start + row), part)  # of ranges of rows

    def bytes_of(self, file: InputFile, part: FileRange) -> tuple[int, int | None] | None:
        """Return the first byte of a range, and the end of its bytes; None for an end stands for that of the file.

        None is returned for a range that is not known to be in a part of the file, and for a file of many rows that is
        one range, such as a compressed one: reading its first row should not take as long as reading all of it. Rows
        that begin in the range may go on after it.
        """
        return (0, None) if part == WHOLE_FILE and self.is_one_document else None

    def address(self, row: int, line: int | None, position: int) -> str:
        """Return the position of a bad row in its file, for messages; empty if the file is one document.

        ``row`` counts in the file or, if ranges are not rows, in its range. ``line`` counts from 1; None if unknown.
        ``position`` is about the byte at which the row ends, for formats whose ranges are bytes.
        """
        return f", row {row}" if line is None else f", line {line}"

    def doubt(self, paths: Sequence[Path]) -> str:
        """Return a sentence if a source's local files seem to hold less than they should, else ""."""
        return ""

    def folder_files(self, names: Sequence[str], read: Callable[[str], bytes]) -> list[str] | None:
        """Return the files of a folder that is one data set of this format, in order; None if it is not one.

        ``names`` are the paths of all its files, relative to the folder, with "/"; ``read`` returns a small file's
        content.

        Raises:
            DataError: it is one, but cannot be read; the message continues the name of the folder.
        """
        return None


def _other_content(path: Path, head: bytes) -> DataError:
    found = recognize(head)
    what = found.what if found else "plain text" if _is_text(head) else "something else"
    remedy = found.remedy if found else f"Give it the ending of what it is, without {path.suffix}, or fetch it again."
    return DataError(f"{path}: the file is not what its ending {path.suffix} says: it begins like {what}. {remedy}")


def _is_text(head: bytes) -> bool:
    """Return True for UTF-8 without zero bytes; the last character may be cut."""
    try:
        return "\0" not in getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False


class RecordsFormat(FileFormat):
    """Text files of records, such as lines, each of which is a row; plain or compressed.

    A range is a part of the bytes of a plain file, and has the records that begin in it. Memory is bounded: a record
    longer than ``MAX_LINE_BYTES`` is a bad row.
    """

    compressible = True
    row_word: ClassVar[str]  # the words of messages for a row,
    record_word: ClassVar[str]  # and for its bytes

    @abstractmethod
    def records(self, stream: Stream, offset: int = 0) -> Iterator[Record]:
        """Yield the records from the stream's position on; ``offset`` bytes precede it."""

    def begin(self, file: InputFile, records: Iterator[Record]) -> Any:
        """Take what precedes the rows, such as a header, from the first records; ``content`` gets what is returned."""

    def check_record(self, record: Record, file: InputFile) -> None:
        """Raise DataError for a record that belongs to no row, whatever its length."""

    @abstractmethod
    def content(self, record: Record, file: InputFile, begun: Any, line: int | None) -> Content | RowError | None:
        """Return the document of a record, or why it is a bad row; ``line`` is None if unknown."""

    def _read(self, file: InputFile, start: int) -> Iterator[Row]:
        with file.path.open("rb") as raw:
            stream = open_decompressed(file.path, raw)
            records = self.records(stream)
            begun = self.begin(file, records)
            for row, record in enumerate(records):
                if row >= start:
                    compressed = None if stream is raw else raw
                    # The content has no name here: it is freed before the next record is read.
                    yield make_row(row, self._content(record, file, begun, record.line, compressed), raw.tell())

    def ranges(self, file: InputFile, size: int) -> Iterator[FileRange]:
        if is_compressed(file.path):
            yield WHOLE_FILE
        else:
            yield from self.plain_ranges(file, size)

    @abstractmethod
    def plain_ranges(self, file: InputFile, size: int) -> Iterator[FileRange]:
        """Yield the ranges of a file that is not compressed, as ``ranges``."""

    def range_reader(self) -> RangeReader:
        return self._read_range

    def _read_range(self, file: InputFile, part: FileRange, row: int) -> Iterator[Row]:
        with convert_file_errors(file.path, self.kind), file.path.open("rb") as raw:
            begun = self.begin(file, self.records(raw))
            raw.seek(max(part.start - 1, 0))
            if part.start == 0:
                self.check(file.path)  # a file of a store is first seen here
            else:
                skip_line(raw)  # the line that contains byte ``start - 1`` begins before ``start``
            # So each record is in exactly one range: that of its first byte.
            for number, record in enumerate(self.records(raw, raw.tell())):
                if record.offset >= part.stop:
                    return
                if number >= row:
                    yield make_row(number, self._content(record, file, begun, None, None), record.end)

    def _content(
        self, record: Record, file: InputFile, begun: Any, line: int | None, compressed: io.BufferedReader | None
    ) -> Content | RowError | None:
        self.check_record(record, file)
        if not record.is_too_long:
            return self.content(record, file, begun, line)
        kept = record.offset + len(record.content)
        expansion = "" if compressed is None else f": {describe_expansion(compressed, kept)}"
        reason = f"a {self.row_word} of more than {MAX_LINE_BYTES:,} bytes{expansion}"
        return RowError(line, reason, f"A document may not be longer: cut it into several, one per {self.row_word}.")

    def bytes_of(self, file: InputFile, part: FileRange) -> tuple[int, int | None] | None:
        return None if part == WHOLE_FILE else part

    def address(self, row: int, line: int | None, position: int) -> str:
        return f", the {self.record_word} that ends at byte {position:,}" if line is None else f", line {line}"
