"""Columns of one row of published runs: numbers and switches, and the readings made so far.

row -> RowColumns -> positive("n_chips"), optional("vocab"), flag("sp"), keep(reading) -> readings
"""

from collections.abc import Mapping
from typing import TypeVar

from published_runs.reader import Reading, UnreadableError, is_unstated, lower, parse_count

CsvRow = Mapping[str, str]
Value = TypeVar("Value")

YES, NO = (
    ("1", "1.0", "true", "yes", "on", "swiglu", "gated", "glu", "geglu"),
    ("0", "0.0", "false", "no", "off", "gelu"),
)
"""Words of a switch."""


class RowColumns:
    """A row by column, and its readings.

    Args:
        row: texts by column.
    """

    def __init__(self, row: CsvRow) -> None:
        self.row = row
        self.readings: list[Reading[object]] = []

    def keep(self, reading: Reading[Value]) -> Value:
        """Keep a reading; return its value."""
        self.readings.append(reading)
        return reading.value

    def text(self, column: str) -> str:
        """The text of a column; empty if it is missing."""
        return self.row.get(column) or ""

    def positive(self, column: str) -> int:
        """Read and keep a positive whole number.

        Raises:
            UnreadableError: it is missing, no number, or not positive.
        """
        value = self.number(column)
        if value < 1:
            raise UnreadableError(f"{column} must be positive: {self.row.get(column)}")
        return self.keep(Reading(column, self.text(column), value))

    def number(self, column: str) -> int:
        """Read a whole number.

        Raises:
            UnreadableError: it is missing or no number.
        """
        try:
            return parse_count(self.text(column))
        except UnreadableError as error:
            raise UnreadableError(f"{column} {error}") from error

    def optional(self, column: str) -> int:
        """Read a whole number; 0 if none is stated.

        Raises:
            UnreadableError: it is no number.
        """
        return 0 if is_unstated(self.row.get(column)) else self.number(column)

    def flag(self, column: str) -> bool | None:
        """Read a switch; None if none is stated.

        Raises:
            UnreadableError: it is no word of a switch.
        """
        text = lower(self.row.get(column))
        if is_unstated(text):
            return None
        if text not in (*YES, *NO):
            raise UnreadableError(f"{column} not understood: {text}")
        return text in YES
