"""Rows that cannot be read while training: told, counted, and too many of them are an error.

Each tokenizing process judges the rows that it has read, as often as it reads them. None may be unreadable where the
stated share is 0; else the share is compared from the hundredth such row on, before which it says little.
"""

from hlat.data.formats import JSON, TEXT, Row
from hlat.data.manifest import MIN_BAD_ROWS, too_many_bad_rows
from hlat.data.online.block_index import WHOLE, FileBlock
from hlat.data.sources import SourceFile
from hlat.runtime import DataError

_REPORTED_ROWS = 20  # of them are told one by one, and remembered, so that none is told again an epoch later


class BadRowMonitor:
    """Counts the rows of a process.

    Args:
        share: the largest share of the rows that may be unreadable.
    """

    def __init__(self, share: float) -> None:
        self._share, self._rows, self._unreadable = share, 0, 0
        self._told: set[str] = set()
        self._notes: list[str] = []

    def count(self, file: SourceFile, block: FileBlock, row: Row) -> None:
        """Take note of a row.

        Raises:
            DataError: it cannot be read, and no more may be.
        """
        self._rows += 1
        if row.error is None:
            return
        self._unreadable += 1
        where, fault = _place(file, block, row), row.error
        if self._share == 0:
            raise DataError(
                f"{where}: {fault.reason}. {fault.remedy} Or set data.unreadable_rows to the share of the rows that "
                "may be left out for being unreadable."
            )
        if self._unreadable >= MIN_BAD_ROWS and too_many_bad_rows(self._unreadable, self._rows, self._share):
            raise DataError(
                f"{self._unreadable:,} of {self._rows:,} rows cannot be read; data.unreadable_rows allows a share of "
                f"{self._share:g}. The last of them: {where}: {fault.reason}. {fault.remedy}"
            )
        self._tell(where, fault.reason)

    def _tell(self, where: str, reason: str) -> None:
        if where in self._told:
            return
        if len(self._told) < _REPORTED_ROWS:
            self._told.add(where)
            rest = "; of further ones only every hundredth is told" if len(self._told) == _REPORTED_ROWS else ""
            self._notes.append(f"{where}: {reason}: left out{rest}")
        elif self._unreadable % MIN_BAD_ROWS == 0:
            self._notes.append(f"{where}: {reason}: left out; it is the {self._unreadable:,}th")

    def notes(self) -> list[str]:
        """What has not been told yet."""
        told, self._notes = self._notes, []
        return told


def _place(file: SourceFile, block: FileBlock, row: Row) -> str:
    kind = file.content[2]
    if row.error is not None and row.error.line is not None:
        return f"{file.path}, line {row.error.line}"
    if kind == TEXT:
        return file.path
    if kind == JSON and block.stop != WHOLE:  # counting lines would read all of the file that lies before
        return f"{file.path}, the line that ends at byte {row.position:,}"
    return f"{file.path}, row {block.start + row.row}"
