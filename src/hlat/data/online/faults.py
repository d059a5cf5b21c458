"""Rows that cannot be read while training: told, counted, and too many of them are an error.

Each tokenizing process judges the rows that it has read. None may be unreadable where the stated share is 0; else the
share is compared from the hundredth such row on, before which it says little.
"""

from hlat.data.online.catalogue import Block
from hlat.data.quarantine import EARLIEST, too_many
from hlat.data.readers import Row
from hlat.runtime import DataError

_TOLD = 20  # of them are told one by one


class Faults:
    """Counts the rows of a process.

    Args:
        share: the largest share of the rows that may be unreadable.
    """

    def __init__(self, share: float) -> None:
        self._share, self._rows = share, 0
        self._seen: set[tuple[str, Block, int]] = set()
        self._notes: list[str] = []

    def count(self, path: str, block: Block, row: Row) -> None:
        """Take note of a row.

        Raises:
            DataError: it cannot be read, and no more may be.
        """
        self._rows += 1
        if row.fault is None:
            return
        fault, line = row.fault, "" if row.fault.line is None else f", line {row.fault.line}"
        where = f"{path}{line or f', row {row.row} of the part from {block.start:,} on'}"
        if self._share == 0:
            raise DataError(
                f"{where}: {fault.reason}. {fault.remedy} Or set data.unreadable_rows to the share of the rows that "
                "may be left out for being unreadable."
            )
        if (path, block, row.row) not in self._seen:
            self._seen.add((path, block, row.row))
            self._tell(f"{where}: {fault.reason}: left out")
        if len(self._seen) >= EARLIEST and too_many(len(self._seen), self._rows, self._share):
            raise DataError(
                f"{len(self._seen):,} of {self._rows:,} rows cannot be read; data.unreadable_rows allows a share of "
                f"{self._share:g}. The last of them: {where}: {fault.reason}. {fault.remedy}"
            )

    def _tell(self, note: str) -> None:
        if len(self._seen) < _TOLD:
            self._notes.append(note)
        elif len(self._seen) % EARLIEST == 0 or len(self._seen) == _TOLD:
            self._notes.append(f"{note}; {len(self._seen):,} rows by now, not all of which are told")

    def notes(self) -> list[str]:
        """What has not been told yet."""
        told, self._notes = self._notes, []
        return told
