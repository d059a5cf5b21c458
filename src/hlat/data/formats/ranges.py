"""Ranges: parts of a file that can be read without what precedes them, for reading while the model trains.

    bytes of a file        --> ranges of bytes, of equal length
    rows of a row group    --> ranges of rows, of about equal bytes

A stream of samples reads ranges from all over the corpus, so a range is small compared with the corpus.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple, Protocol

from hlat.data.formats.records import InputFile, Row

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
