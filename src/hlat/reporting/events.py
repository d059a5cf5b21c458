"""Events of a run with checked times and steps.

events.jsonl -> RunEvent: kind, seconds since 1970, step if it has one, all fields
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hlat.tracking import read_events

_BEGINNINGS = ("start", "resume")


@dataclass(frozen=True)
class RunEvent:
    """An event.

    Attributes:
        kind: what happened.
        time: seconds since 1970.
        step: its step; None if it has none.
        fields: all fields as they were recorded.
    """

    kind: str
    time: float
    step: int | None
    fields: Mapping[str, Any]

    @property
    def when(self) -> str:
        """Time of the event as text, UTC."""
        return str(self.fields["time"])[:19].replace("T", " ")

    @property
    def begins(self) -> bool:
        """True if processes of the run began their steps here."""
        return self.kind in _BEGINNINGS

    @property
    def has_recipe(self) -> bool:
        """True if the event has the resolved recipe."""
        return isinstance(self.fields.get("recipe"), dict)

    def words(self, *names: str) -> str:
        """Return some fields as text; empty for fields that it does not have."""
        return ", ".join(str(self.fields[name]) for name in names if self.fields.get(name) not in (None, ""))

    def number(self, name: str) -> float | None:
        """Return a field that is a number; None if it is not."""
        value = self.fields.get(name)
        return float(value) if isinstance(value, (int, float)) else None


def read_run_events(path: Path) -> list[RunEvent]:
    """Read the events of a run; records without a kind or a time are left out. No file is no events.

    Raises:
        DataError: a line other than the last is damaged.
        StorageError: the file cannot be read.
    """
    return run_events(read_events(path) if path.is_file() else [])


def run_events(records: Sequence[Mapping[str, Any]]) -> list[RunEvent]:
    """Return records as events; those without a kind or a time are left out."""
    found = []
    for record in records:
        step = record.get("step")
        try:
            time = datetime.fromisoformat(str(record.get("time"))).timestamp()
        except ValueError:
            continue
        found.append(RunEvent(str(record.get("event", "")), time, step if type(step) is int else None, record))
    return found
