"""State of a run: running, finished, stopped, failed, killed or restarting; its events with checked times, steps.

    events.jsonl --run_events--> RunEvent: kind, seconds since 1970, step if it has one, all fields
    last events, process id in the lock file --read_status--> RunStatus

The lock itself is not tried: that would, for a moment, keep a run from starting.
"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from hlat.runtime.errors import DataError
from hlat.runtime.process import is_running
from hlat.runtime.storage.run_folder import ATTEMPTS_NAME, LOCK_NAME
from hlat.tracking import read_events

_BEGINNINGS = ("start", "resume")


@dataclass(frozen=True)
class RunEvent:
    """An event of events.jsonl, with checked time and step."""

    kind: str  # what happened
    time: float  # seconds since 1970
    step: int | None  # None if it has none
    fields: Mapping[str, Any]  # all, as they were recorded

    @property
    def when(self) -> str:
        return str(self.fields["time"])[:19].replace("T", " ")

    @property
    def begins(self) -> bool:
        return self.kind in _BEGINNINGS

    @property
    def has_recipe(self) -> bool:
        return isinstance(self.fields.get("recipe"), dict)

    def words(self, *names: str) -> str:
        """Return some fields as text; empty for fields that it does not have."""
        return ", ".join(str(self.fields[name]) for name in names if self.fields.get(name) not in (None, ""))

    def number(self, name: str) -> float | None:
        value = self.fields.get(name)
        return float(value) if isinstance(value, (int, float)) else None


def read_run_events(path: Path) -> list[RunEvent]:
    """Read the events of a run; no file is no events. DataError if a line other than the last is damaged."""
    return run_events(read_events(path) if path.is_file() else [])


def run_events(records: Sequence[Mapping[str, Any]]) -> list[RunEvent]:
    """Return records as events; those without a time are left out."""
    found = []
    for record in records:
        step = record.get("step")
        try:
            # The file may have been edited or written by another version.
            time = datetime.fromisoformat(str(record.get("time"))).timestamp()
        except ValueError:
            continue
        found.append(RunEvent(str(record.get("event", "")), time, step if type(step) is int else None, record))
    return found


_LOOKED_AT = 1_000  # folders whose names are compared: more would take long
_LONGEST_NAME = 100  # characters compared: difflib takes quadratic time
# Events that change the state of a run; others, such as checkpoints, do not.
_STEPPING = ("start", "resume", "end", "error", "incident")


@dataclass(frozen=True)
class RunStatus:
    """State of a run in a word, and the reason in a few."""

    state: str
    reason: str = ""

    @property
    def goes_on(self) -> bool:
        # Unknown: its process is on another machine, and may still write.
        return self.state in ("running", "restarting", "unknown")


def is_run(folder: Path) -> bool:
    """True if a folder is that of a run that has begun."""
    return any((folder / name).is_file() for name in ("metrics.jsonl", "events.jsonl", ATTEMPTS_NAME))


def no_run(folder: Path) -> DataError:
    """Error for a folder that is not that of a run, with the run that may be meant."""
    if not folder.exists():
        runs = [each.name for each in islice(_folders_in(folder.parent), _LOOKED_AT) if is_run(each)]
        close = get_close_matches(folder.name[:_LONGEST_NAME], runs, n=1)
        meant = f"Did you mean {folder.parent / close[0]}? " if close else ""
        return DataError(f"{folder}: does not exist. {meant}`hlat runs DIR` lists the runs below a folder.")
    kind = "not the folder of a run, but a file" if folder.is_file() else "not the folder of a run"
    return DataError(
        f"{folder}: is {kind}: it has neither metrics.jsonl nor events.jsonl nor {ATTEMPTS_NAME}. "
        "`hlat runs DIR` lists the runs below a folder."
    )


def _folders_in(parent: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from parent.iterdir()


def read_status(folder: Path, events: Sequence[RunEvent]) -> RunStatus:
    """Find out the state of a run from its events and the process that trained last."""
    last = next((event for event in reversed(events) if event.kind in _STEPPING), None)
    if last is None:
        return _by_process(folder)
    if last.kind == "end":
        reason = last.words("reason")
        return RunStatus("finished") if reason == "finished" else RunStatus("stopped", reason)
    if last.kind == "error":
        return RunStatus("failed", last.words("message"))
    if last.kind == "incident":
        # The supervisor has decided; the next attempt records its start.
        return RunStatus("restarting" if last.fields.get("restart") else "failed", last.words("cause"))
    return _by_process(folder)


def _by_process(folder: Path) -> RunStatus:
    try:
        # The run has not recorded its end, so the process in its lock file tells. The lock is not tried: that would
        # keep a run from starting.
        words = (folder / LOCK_NAME).read_text(encoding="utf-8", errors="replace").replace(",", "").split()
    except OSError:
        return RunStatus("killed", "no process is training in its folder")
    if len(words) < 4 or words[0] != "pid" or not words[1].isdecimal():
        return RunStatus("killed", "no process is training in its folder")
    # A process id means nothing on another machine.
    if words[3] != socket.gethostname():
        return RunStatus("unknown", f"process {words[1]} on {words[3]} has not recorded its end")
    if is_running(int(words[1])):
        return RunStatus("running", f"process {words[1]}")
    return RunStatus("killed", f"process {words[1]} has ended without recording why")
