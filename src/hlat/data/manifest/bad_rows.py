"""Rows that cannot be read: how many there may be, and the file that lists them.

They are judged in the order of the corpus, row by row, so that any number of workers and any interruptions come to the
same verdict at the same row: none may be where the stated share is 0; else the share is compared from the hundredth
such row on, before which it says little of the corpus, and at the end of the corpus whatever their number.
"""

import json
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor, log10
from pathlib import Path
from typing import NamedTuple

from hlat.data.formats import TEXT
from hlat.data.manifest.manifest import QUARANTINE_FILE, QuarantineRecord
from hlat.data.sources import SourceFile
from hlat.data.stores import AtomicFileWriter
from hlat.runtime import DataError

MIN_BAD_ROWS = 100
"""Unreadable rows after which their share is judged, though rows follow."""
_EXAMPLES = 3


class BadRow(NamedTuple):
    """A row that could not be read.

    Attributes:
        file: index of its file.
        row: its index in the file, from 0.
        line: line of the file that it is, from 1; None where rows are not lines.
        rows: rows of the unit up to it, itself included.
        reason, remedy: what is wrong, and a sentence on what would put it right.
    """

    file: int
    row: int
    line: int | None
    rows: int
    reason: str
    remedy: str


class BadRowCounter:
    """Counts rows, in the order of the corpus, and raises DataError once too many of them cannot be read.

    Args:
        share: the largest share of the rows that may be unreadable.
        files: the files that rows are numbered by.
    """

    def __init__(self, share: float, files: list[SourceFile]) -> None:
        self._share, self._files = share, files
        self._rows = self._unreadable = 0
        self._examples: list[str] = []

    def add(self, rows: int, unreadable: Sequence[BadRow]) -> None:
        """Count a stretch of rows and those of them that cannot be read, each with the rows of the stretch up to it."""
        before = self._rows
        for bad in unreadable:
            self._rows = before + bad.rows
            self._unreadable += 1
            place = _place(bad, self._files)
            if self._share == 0:
                raise DataError(
                    f"{place}: {bad.reason}. {bad.remedy} Or set data.unreadable_rows to the share of the rows that "
                    "may be left out for being unreadable."
                )
            if len(self._examples) < _EXAMPLES:
                self._examples.append(f"{place}: {bad.reason}. {bad.remedy}")
            if self._unreadable >= MIN_BAD_ROWS:
                self._judge("so far")
        self._rows = before + rows

    def finish(self) -> None:
        """Judge what was counted: no rows follow."""
        self._judge("in all")

    def _judge(self, when: str) -> None:
        if not too_many_bad_rows(self._unreadable, self._rows, self._share):
            return
        found = self._unreadable / self._rows
        enough = _rounded_up(found)
        allow = f", or set data.unreadable_rows={enough:g}, and run the same command again" if enough < 1 else ""
        listed = "".join(f"\n  {example}" for example in self._examples)
        raise DataError(
            f"{self._unreadable:,} of {self._rows:,} rows {when} cannot be read, a share of {found:.3g}; "
            f"data.unreadable_rows allows {self._share:g}. The first of them:{listed}\n"
            f"Repair these files, or leave them out{allow}: what was finished is kept as long as the corpus stays the "
            "same."
        )


def too_many_bad_rows(unreadable: int, rows: int, share: float) -> bool:
    """Whether more rows are unreadable than a share of all, as it is written in decimal."""
    return unreadable > Fraction(repr(share)) * rows


class QuarantineWriter:
    """Writes the list of the rows that cannot be read, one JSON object a line; no file where there are none.

    Args:
        folder: where the file goes.
        files: the files that rows are numbered by.
    """

    def __init__(self, folder: Path, files: list[SourceFile]) -> None:
        self._path, self._files = folder / QUARANTINE_FILE, files
        self._file: AtomicFileWriter | None = None
        self._rows = 0

    def append(self, unreadable: Sequence[BadRow]) -> None:
        """List some more."""
        for bad in unreadable:
            record = {"file": self._files[bad.file].path, **_numbers(bad), "reason": bad.reason}
            self._file = self._file or AtomicFileWriter(self._path)
            self._file.write(json.dumps(record).encode() + b"\n")
            self._rows += 1

    def close(self) -> QuarantineRecord | None:
        """Finish the file; None where nothing was listed."""
        if self._file is None:
            return None
        return QuarantineRecord(file=QUARANTINE_FILE, rows=self._rows, sha256=self._file.close())

    def abandon(self) -> None:
        """Give up the file, unless it is finished."""
        if self._file is not None:
            self._file.abandon()


def _numbers(bad: BadRow) -> dict[str, int]:
    return {"row": bad.row} if bad.line is None else {"row": bad.row, "line": bad.line}


def _place(bad: BadRow, files: list[SourceFile]) -> str:
    file = files[bad.file]
    if bad.line is not None:
        return f"{file.path}, line {bad.line}"
    kind = file.content[2]
    return file.path if kind == TEXT else f"{file.path}, row {bad.row}"


def _rounded_up(share: float) -> float:
    """The smallest number of two digits that is not below a share."""
    scale = 10.0 ** (1 - floor(log10(share)))
    return ceil(share * scale) / scale
