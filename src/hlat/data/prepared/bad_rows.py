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

MIN_BAD_ROWS = 100  # bad rows from which on their share is checked before the end of the corpus
_MAX_EXAMPLES = 3


class BadRowCounter:
    """Counts rows in the order of the corpus; DataError once more than ``share`` of them are bad."""

    def __init__(self, share: float, files: list[SourceFile]) -> None:
        self._share, self._files = share, files
        self._rows = self._bad_rows = 0
        self._examples: list[str] = []

    def add(self, rows: int, bad_rows: Sequence[BadRow]) -> None:
        """Count the rows of a work unit, of which ``bad_rows`` are bad; DataError for too many."""
        before = self._rows
        for bad in bad_rows:
            # The rows up to this one, so that the count at an error does not depend on the size of units.
            self._rows = before + bad.rows
            self._bad_rows += 1
            file = self._files[bad.file]
            where = f"{file.path}{file.format.address(bad.row, bad.line, file.size)}"
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
        """Check the share at the end of the corpus; DataError for too many."""
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
    """Return True if more than a share of the rows are bad."""
    # Exactly the share that is written in the recipe: 0.1 as a float is a little more than a tenth.
    return bad_rows > Fraction(repr(share)) * rows


class QuarantineWriter:
    """Writes the quarantine file, one JSON object per bad row; without bad rows there is no file."""

    def __init__(self, folder: Path, files: list[SourceFile]) -> None:
        self._path, self._files = folder / QUARANTINE_FILE, files
        self._file: AtomicFileWriter | None = None
        self._rows = 0

    def append(self, bad_rows: Sequence[BadRow]) -> None:
        for bad in bad_rows:
            line = {} if bad.line is None else {"line": bad.line}
            record = {"file": self._files[bad.file].path, "row": bad.row, **line, "reason": bad.reason}
            self._file = self._file or AtomicFileWriter(self._path)
            self._file.write(json.dumps(record).encode() + b"\n")
            self._rows += 1

    def close(self) -> QuarantineRecord | None:
        """Complete the file and return its record; None if there were no bad rows."""
        if self._file is None:
            return None
        return QuarantineRecord(file=QUARANTINE_FILE, rows=self._rows, sha256=self._file.close())

    def abandon(self) -> None:
        if self._file is not None:
            self._file.abandon()


def _round_up(share: float) -> float:
    # Two significant digits, rounded up: the share that is suggested must be enough.
    scale = 10.0 ** (1 - floor(log10(share)))
    return ceil(share * scale) / scale
