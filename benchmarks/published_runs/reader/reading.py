"""Readings: the value of a text, and the certainty of that value.

    text of a column -> Reading(value, sure, spread)  |  UnreadableError(reason)

A reader never replaces a text that it does not understand by a default. Where a row leaves something open and the run
can be predicted all the same, the reading is ``assumed``, says so in ``reason``, and widens the prediction's interval.
"""

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Certainty = Literal["stated", "implied", "assumed"]
Value_co = TypeVar("Value_co", covariant=True)


class UnreadableError(Exception):
    """A text that a reader does not understand; the message says why."""


@dataclass(frozen=True)
class Reading(Generic[Value_co]):
    """The value of one column of a row.

    Attributes:
        column: name of the column, or of the field that the row leaves open.
        text: text of the column, as published.
        value: the value.
        sure: ``stated`` in the text, ``implied`` by other columns and a documented convention, or ``assumed``.
        reason: convention or assumption, for readings that are not stated.
        spread: standard deviation of the logarithm of the step time that the uncertainty of this reading causes.
    """

    column: str
    text: str
    value: Value_co
    sure: Certainty = "stated"
    reason: str = ""
    spread: float = 0.0

    def to_dict(self) -> dict[str, object]:
        """JSON values."""
        return {
            "column": self.column,
            "text": self.text,
            "reading": str(self.value),
            "sure": self.sure,
            "reason": self.reason,
            "spread": self.spread,
        }
