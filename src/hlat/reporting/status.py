"""State of a run: running, finished, stopped, failed, killed or restarting.

last events, process id in the lock file -> RunStatus

The lock itself is not tried: that would, for a moment, keep a run from starting.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from hlat.reporting.events import RunEvent
from hlat.runtime.errors import DataError
from hlat.runtime.process.process_status import is_running
from hlat.runtime.storage.run_folder import ATTEMPTS_NAME, LOCK_NAME

_LOOKED_AT = 1_000  # folders whose names are compared
_LONGEST_NAME = 100  # characters of a name that is compared
_STEPPING = ("start", "resume", "end", "error", "incident")


@dataclass(frozen=True)
class RunStatus:
    """State of a run in a word, and the reason in a few."""

    state: str
    reason: str = ""

    @property
    def goes_on(self) -> bool:
        """True if the run may still be writing."""
        return self.state in ("running", "restarting", "unknown")


def is_run(folder: Path) -> bool:
    """Return True if a folder is that of a run that has begun."""
    return any((folder / name).is_file() for name in ("metrics.jsonl", "events.jsonl", ATTEMPTS_NAME))


def no_run(folder: Path) -> DataError:
    """Return the error of a folder that is not that of a run, with the run that may be meant."""
    if not folder.exists():
        runs = [each.name for each in islice(_folders(folder.parent), _LOOKED_AT) if is_run(each)]
        close = get_close_matches(folder.name[:_LONGEST_NAME], runs, n=1)
        meant = f"Did you mean {folder.parent / close[0]}? " if close else ""
        return DataError(f"{folder}: does not exist. {meant}`hlat runs DIR` lists the runs below a folder.")
    kind = "not the folder of a run, but a file" if folder.is_file() else "not the folder of a run"
    return DataError(
        f"{folder}: is {kind}: it has neither metrics.jsonl nor events.jsonl nor {ATTEMPTS_NAME}. "
        "`hlat runs DIR` lists the runs below a folder."
    )


def _folders(parent: Path) -> Iterator[Path]:
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
        return RunStatus("restarting" if last.fields.get("restart") else "failed", last.words("cause"))
    return _by_process(folder)


def _by_process(folder: Path) -> RunStatus:
    """Return the state of a run that has not recorded its end: that of the process in its lock file."""
    try:
        words = (folder / LOCK_NAME).read_text(encoding="utf-8", errors="replace").replace(",", "").split()
    except OSError:
        return RunStatus("killed", "no process is training in its folder")
    if len(words) < 4 or words[0] != "pid" or not words[1].isdecimal():
        return RunStatus("killed", "no process is training in its folder")
    if words[3] != socket.gethostname():
        return RunStatus("unknown", f"process {words[1]} on {words[3]} has not recorded its end")
    if is_running(int(words[1])):
        return RunStatus("running", f"process {words[1]}")
    return RunStatus("killed", f"process {words[1]} has ended without recording why")
