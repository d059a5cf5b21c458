"""Bad rows, which cannot be read: the limit on their share, and the quarantine file that lists them.

    bad row --BadRowCounter--> too many: DataError | --QuarantineWriter--> quarantine.jsonl

Rows are checked in the order of the corpus, so that any number of workers and any interruptions end preparation at the
same row. If the allowed share is 0, the first bad row is an error. Otherwise the share is checked from the hundredth
bad row on, before which it is not representative of the corpus, and once more at the end of the corpus.
"""

import json
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor, log10
from pathlib import Path

from hlat.data.documents import BadRow
from hlat.data.prepared.manifest import QUARANTINE_FILE, QuarantineRecord
from hlat.data.source_file import SourceFile
from hlat.data.stores.local_files import AtomicFileWriter
from hlat.runtime.errors import DataError

MIN_BAD_ROWS = 100
"""Bad rows from which on their share is checked before the end of the corpus."""
_MAX_EXAMPLES = 3


class BadRowCounter:
    """Counter of rows, in the order of the corpus, that raises DataError once too many of them are bad.

    Args:
        share: maximum share of bad rows, from data.unreadable_rows.
        files: files of the corpus, which ``BadRow.file`` indexes.
    """

    def __init__(self, share: float, files: list[SourceFile]) -> None:
        self._share, self._files = share, files
        self._rows = self._bad_rows = 0
        self._examples: list[str] = []

    def add(self, rows: int, bad_rows: Sequence[BadRow]) -> None:
        """Count the rows of a work unit.

        Args:
            rows: number of rows.
            bad_rows: the bad ones among them, in order.

        Raises:
            DataError: too many rows are bad.
        """
        before = self._rows
        for bad in bad_rows:
            self._rows = before + bad.rows
            self._bad_rows += 1
            where = _describe_position(bad, self._files)
            if self._share == 0:
                raise DataError(
                    f"{where}: {bad.reason}. {bad.remedy} Or set data.unreadable_rows to the share of rows that may "
                    "be left out because they cannot be read."
                )
            if len(self._examples) < _MAX_EXAMPLES:
                self._examples.append(f"{where}: {bad.reason}. {bad.remedy}")
            if self._bad_rows >= MIN_BAD_ROWS:
                self._check("so far")
        self._rows = before + rows

    def finish(self) -> None:
        """Check the share of bad rows at the end of the corpus.

        Raises:
            DataError: too many rows are bad.
        """
        self._check("in all")

    def _check(self, when: str) -> None:
        if not too_many_bad_rows(self._bad_rows, self._rows, self._share):
            return
        found = self._bad_rows / self._rows
        enough = _round_up(found)
        allow = f", or set data.unreadable_rows={enough:g}, and run the same command again" if enough < 1 else ""
        listed = "".join(f"\n  {example}" for example in self._examples)
        raise DataError(
            f"{self._bad_rows:,} of {self._rows:,} rows {when} cannot be read, a share of {found:.3g}; "
            f"data.unreadable_rows allows {self._share:g}. The first of them:{listed}\n"
            f"Repair these files, or leave them out{allow}: finished work is kept as long as the corpus is not "
            "changed."
        )


def too_many_bad_rows(bad_rows: int, rows: int, share: float) -> bool:
    """Return True if more than a share of the rows are bad; the share is taken exactly as it is written in decimal."""
    return bad_rows > Fraction(repr(share)) * rows


class QuarantineWriter:
    """Writer of the quarantine file: the bad rows, one JSON object per line. Without bad rows no file is written.

    Args:
        folder: folder of the file.
        files: files of the corpus, which ``BadRow.file`` indexes.
    """

    def __init__(self, folder: Path, files: list[SourceFile]) -> None:
        self._path, self._files = folder / QUARANTINE_FILE, files
        self._file: AtomicFileWriter | None = None
        self._rows = 0

    def append(self, bad_rows: Sequence[BadRow]) -> None:
        """Write more rows."""
        for bad in bad_rows:
            record = {"file": self._files[bad.file].path, **_row_numbers(bad), "reason": bad.reason}
            self._file = self._file or AtomicFileWriter(self._path)
            self._file.write(json.dumps(record).encode() + b"\n")
            self._rows += 1

    def close(self) -> QuarantineRecord | None:
        """Complete the file and return its record; return None if there were no bad rows."""
        if self._file is None:
            return None
        return QuarantineRecord(file=QUARANTINE_FILE, rows=self._rows, sha256=self._file.close())

    def abandon(self) -> None:
        """Remove the file if it is not complete."""
        if self._file is not None:
            self._file.abandon()


def _row_numbers(bad: BadRow) -> dict[str, int]:
    return {"row": bad.row} if bad.line is None else {"row": bad.row, "line": bad.line}


def _describe_position(bad: BadRow, files: list[SourceFile]) -> str:
    file = files[bad.file]
    return f"{file.path}{file.format.address(bad.row, bad.line, file.size)}"


def _round_up(share: float) -> float:
    """Round a share up to two significant digits."""
    scale = 10.0 ** (1 - floor(log10(share)))
    return ceil(share * scale) / scale
