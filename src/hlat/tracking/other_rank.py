"""What the ranks besides the first tell: their messages, in their own logs. The record of a run has one writer."""

from types import TracebackType
from typing import Any, Self

from hlat.runtime import escape_controls, redact
from hlat.tracking.metrics import Metrics


class OtherRank:
    """Takes what a ``Tracker`` takes; keeps the messages, which go to standard output and so to the rank's log."""

    def log(self, metrics: Metrics) -> None:
        """The first rank records this."""

    def event(self, kind: str, /, **fields: Any) -> None:
        """The first rank records this."""

    def rewind(self, step: int) -> None:
        """The first rank does this."""

    def message(self, text: str) -> None:
        """Write a line to the log."""
        print(escape_controls(redact(text)), flush=True)  # noqa: T201  (this rank's standard output is its log)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""
