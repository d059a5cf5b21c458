"""Tracker of the ranks other than 0: it prints messages to the rank's log. Only rank 0 writes metrics and events."""

from types import TracebackType
from typing import Any, Self

from hlat.runtime.terminal_text import escape_controls
from hlat.runtime.urls import redact
from hlat.tracking.metrics import Metrics


class OtherRankTracker:
    """Stand-in for ``Tracker`` on other ranks: it prints messages to standard output, and ignores all else."""

    def log(self, metrics: Metrics) -> None:
        """Do nothing: rank 0 records the metrics."""

    def step_done(self, step: int) -> None:
        """Do nothing: rank 0 shows the step."""

    def event(self, kind: str, /, **fields: Any) -> None:
        """Do nothing: rank 0 records the event."""

    def rewind(self, step: int) -> None:
        """Do nothing: rank 0 rewinds the metrics."""

    def message(self, text: str) -> None:
        """Write a line to the log."""
        print(escape_controls(redact(text)), flush=True)  # noqa: T201  (this rank's standard output is its log)

    def warn(self, text: str) -> None:
        """Write a warning to the log."""
        self.message(f"warning: {text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: no file is open."""
