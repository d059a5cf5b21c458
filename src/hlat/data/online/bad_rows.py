"""Rows that cannot be read during training: reported, counted, and an error if there are too many.

Each tokenizing process counts the rows it has read, as often as it reads them. If data.unreadable_rows is 0, the first
bad row is an error; otherwise the fraction is checked from the hundredth bad row on, since it means little before.
"""

from hlat.data.formats.records import Row
from hlat.data.manifest.bad_rows import MIN_BAD_ROWS, too_many_bad_rows
from hlat.data.online.block_index import FileBlock
from hlat.data.sources.source_file import SourceFile
from hlat.runtime.errors import DataError

_REPORTED_ROWS = 20  # bad rows reported one by one, and remembered, so that none is reported again an epoch later


class BadRowMonitor:
    """Counts the rows and bad rows of one process, and reports bad rows.

    Args:
        share: the largest fraction of rows that may be unreadable.
    """

    def __init__(self, share: float) -> None:
        self._share, self._rows, self._unreadable = share, 0, 0
        self._reported: set[str] = set()
        self._notes: list[str] = []

    def count(self, file: SourceFile, block: FileBlock, row: Row) -> None:
        """Count a row.

        Raises:
            DataError: the row cannot be read, and the limit is exceeded.
        """
        self._rows += 1
        if row.error is None:
            return
        self._unreadable += 1
        where, error = _describe_row(file, block, row), row.error
        if self._share == 0:
            raise DataError(
                f"{where}: {error.reason}. {error.remedy} Or set data.unreadable_rows to the share of the rows that "
                "may be left out for being unreadable."
            )
        if self._unreadable >= MIN_BAD_ROWS and too_many_bad_rows(self._unreadable, self._rows, self._share):
            raise DataError(
                f"{self._unreadable:,} of {self._rows:,} rows cannot be read; data.unreadable_rows allows a share of "
                f"{self._share:g}. The last of them: {where}: {error.reason}. {error.remedy}"
            )
        self._report(where, error.reason)

    def _report(self, where: str, reason: str) -> None:
        if where in self._reported:
            return
        if len(self._reported) < _REPORTED_ROWS:
            self._reported.add(where)
            rest = "; from now on only every hundredth is reported" if len(self._reported) == _REPORTED_ROWS else ""
            self._notes.append(f"{where}: {reason}: left out{rest}")
        elif self._unreadable % MIN_BAD_ROWS == 0:
            self._notes.append(f"{where}: {reason}: left out; unreadable row number {self._unreadable:,}")

    def notes(self) -> list[str]:
        """Return the notes since the last call."""
        notes, self._notes = self._notes, []
        return notes


def _describe_row(file: SourceFile, block: FileBlock, row: Row) -> str:
    """Return file and line or row of a bad row, for messages."""
    line = None if row.error is None else row.error.line
    return f"{file.path}{file.format.address(block.start + row.row, line, row.position)}"
