"""The record of a row that could not be read. Worker processes import it, so it stands apart from the manifest."""

from typing import NamedTuple


class BadRow(NamedTuple):
    """A row that could not be read.

    Attributes:
        file: index of its file.
        row: index in the file, from 0.
        line: line number in the file, from 1; None if rows are not lines.
        rows: rows of the work unit up to and including this one.
        reason: the problem.
        remedy: a sentence that says how to fix it.
    """

    file: int
    row: int
    line: int | None
    rows: int
    reason: str
    remedy: str
