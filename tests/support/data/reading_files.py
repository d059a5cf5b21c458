"""Readers of a single file, as preparation and online training read it."""

from collections.abc import Iterator
from pathlib import Path

from hlat.data.documents import Vocabulary
from hlat.data.formats.base import FileRange
from hlat.data.formats.registry import format_of
from hlat.data.formats.rows import TEXT_COLUMN, ColumnKind, InputFile, Row


def read_documents(
    file: Path, column: str, start: int = 0, kind: ColumnKind = TEXT_COLUMN, vocabulary: Vocabulary | None = None
) -> Iterator[Row]:
    """Read the documents of a file from row ``start`` on."""
    return format_of(file, kind).documents(InputFile(file, column, vocabulary), start)


def read_ranges(
    file: Path, column: str, size: int, kind: ColumnKind = TEXT_COLUMN, vocabulary: Vocabulary | None = None
) -> list[list[Row]]:
    """Read the ranges of a file of about ``size`` bytes each, in order; return the rows of each."""
    file_format, opened = format_of(file, kind), InputFile(file, column, vocabulary)
    reader = file_format.range_reader()
    return [list(reader(opened, part, 0)) for part in file_format.ranges(opened, size)]


def read_lines(file: Path, column: str, start: int, stop: int) -> Iterator[Row]:
    """Read the lines of a file that begin in a range of bytes."""
    return format_of(file).range_reader()(InputFile(file, column), FileRange(start, stop), 0)
