"""Further outputs of the metrics, besides metrics.jsonl and the console: TensorBoard and hosted trackers."""

from dataclasses import dataclass
from typing import Any, Protocol

from hlat.tracking.metrics import Metrics


@dataclass(frozen=True)
class TrackerNote:
    """Something that went wrong with an output.

    Attributes:
        kind: kind of the event.
        text: line for the user.
        fields: fields of the event.
    """

    kind: str
    text: str
    fields: dict[str, Any]


def moved_note(name: str, move: str) -> TrackerNote:
    """Return the note about a file of the run that was moved while the run appended to it."""
    kept = "nothing is lost"
    if move == "another file":
        kept = "what was written while a program made that other file may be only in the old one"
    text = f"{name} was renamed, removed or replaced while the run writes to it: opened again, {kept}"
    return TrackerNote("record_restored", text, {"file": name})


class MetricsOutput(Protocol):
    """Further output of the metrics, which a run can do without."""

    def log(self, metrics: Metrics) -> None:
        """Add the metrics of a step.

        Raises:
            StorageError: they cannot be written; the output is closed and dropped.
        """

    def rewind(self, step: int) -> None:
        """Drop steps after ``step``, which will be repeated, if that is possible; may raise StorageError."""

    def notes(self) -> list[TrackerNote]:
        """Return and clear what went wrong, to be reported."""

    def close(self, failed: bool = False) -> None:
        """Close the output; ``failed`` if the run ends by an error. Closing it twice is harmless."""
