"""State of a run: running, finished, stopped, failed, killed or restarting; its events; and a list of runs.

    events.jsonl --run_events--> RunEvent: kind, seconds since 1970, step if it has one, all fields
    last events, process id in the lock file --read_status--> RunStatus
    folder -> folders with metrics.jsonl or events.jsonl --ends of their files--> RunSummary each, by ``list_runs``

The lock itself is not tried: that would, for a moment, keep a run from starting.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.runtime.errors import DataError, HlatError
from hlat.runtime.process import is_running
from hlat.runtime.storage.run_folder import ATTEMPTS_NAME, LOCK_NAME
from hlat.tracking import read_events, read_last_metrics

if TYPE_CHECKING:
    from hlat.config import Recipe

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
        return number_of(self.fields, name)


def number_of(fields: Mapping[str, Any], name: str) -> float | None:
    """Return a number among values of JSON; None if it is missing or something else."""
    value = fields.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def parameters_of(events: Sequence[RunEvent]) -> int | None:
    """Return the parameters of a run's model; None if its steps have not begun."""
    counts = (event.number("parameters") for event in reversed(events) if event.begins)
    return next((int(count) for count in counts if count), None)


def read_run_events(path: Path) -> list[RunEvent]:
    """Read the events of a run; no file is no events. DataError if a line other than the last is damaged."""
    return run_events(read_events(path) if path.is_file() else [])


def last_recipe(events: Sequence[RunEvent]) -> Mapping[str, Any] | None:
    """Return the recipe of the newest event that has one, as JSON values."""
    # The newest wins: a run may be resumed with changes.
    return next((event.fields["recipe"] for event in reversed(events) if event.has_recipe), None)


def last_stage(events: Sequence[RunEvent]) -> str:
    """Return the name of the stage that a run is in, or was in last; empty without stages."""
    return next((event.words("stage") for event in reversed(events) if event.kind in (*_BEGINNINGS, "stage")), "")


def stage_words(settings: Mapping[str, Any], stage: str) -> str:
    """Return a stage with its number, as in ``stage anneal, 2 of 3``; empty without one."""
    names = [each.get("name") for each in settings.get("stages") or ()]
    return f"stage {stage}, {names.index(stage) + 1} of {len(names)}" if stage in names else ""


def forecast_event(events: Sequence[RunEvent]) -> RunEvent | None:
    """Return the event with which the forecast of a run was registered; None if it has none."""
    return next((event for event in events if event.kind == "forecast"), None)


def other_length(events: Sequence[RunEvent], tokens: float | None) -> str:
    """Say of a forecast of so many tokens that the run now has another length; empty if it has not, or nobody knows."""
    recipe = _last_valid_recipe(events)
    if recipe is None or tokens is None or recipe.total_tokens == tokens:
        return ""
    return f"of a run of {tokens:,.0f} tokens, and this one now has {recipe.total_tokens:,}"


def forecast_range(events: Sequence[RunEvent]) -> tuple[str, str] | None:
    """Return the forecast loss, and its range, by which ladder and when it was registered, as text; None without."""
    event = forecast_event(events)
    if event is None:
        return None
    loss, low, high = (f"{event.number(name) or 0.0:.3f}" for name in ("loss", "low", "high"))
    late = f", after {event.step:,} steps" if event.step else ""
    other = other_length(events, event.number("tokens"))
    note = f"{low} to {high}, by ladder {event.words('ladder')}, written {event.when} UTC{late}"
    return loss, f"{note}; {other}" if other else note


def forecast_line(events: Sequence[RunEvent], loss: float | None, tokens: float | None) -> str:
    """Return forecast and actual loss as a sentence; empty without a forecast.

    ``loss`` is the last validation loss, ``tokens`` those done by then.
    """
    event, found = forecast_event(events), forecast_range(events)
    if event is None or found is None:
        return ""
    of = event.number("tokens")
    share, done = (tokens or 0.0) / (of or 1.0), ""
    if loss is not None and not other_length(events, of):
        done = f"; actual {loss:.3f}" if share >= 1 else f"; {loss:.3f} after {share:.0%} of the tokens"
    expected, note = found
    return f"validation loss at the end: forecast {expected} ({note}){done}"


def run_name(settings: Mapping[str, Any], folder: Path) -> str:
    """Name of a run: that in its recipe, or of its folder."""
    run = settings.get("run")
    return str((run.get("name") if isinstance(run, dict) else None) or folder.resolve().name)


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


_RUN_FILES = ("metrics.jsonl", "events.jsonl", ATTEMPTS_NAME)
_LOOKED_AT = 1_000  # folders whose names are compared: more would take long
_LONGEST_NAME = 100  # characters compared: difflib takes quadratic time
# Events that change the state of a run; others, such as checkpoints, do not.
_STEPPING = ("fork", "start", "resume", "end", "error", "incident")


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
    return any((folder / name).is_file() for name in _RUN_FILES)


def no_run(folder: Path) -> DataError:
    """Error for a folder that is not that of a run, with the run that may be meant."""
    if not folder.exists():
        beside: list[Path] = []
        with suppress(OSError):
            beside = list(islice(folder.parent.iterdir(), _LOOKED_AT))
        runs = [each.name for each in beside if is_run(each)]
        close = get_close_matches(folder.name[:_LONGEST_NAME], runs, n=1)
        meant = f"Did you mean {folder.parent / close[0]}? " if close else ""
        return DataError(f"{folder}: does not exist. {meant}`hlat runs DIR` lists the runs below a folder.")
    kind = "not the folder of a run, but a file" if folder.is_file() else "not the folder of a run"
    return DataError(
        f"{folder}: is {kind}: it has neither metrics.jsonl nor events.jsonl nor {ATTEMPTS_NAME}. "
        "`hlat runs DIR` lists the runs below a folder."
    )


def read_status(folder: Path, events: Sequence[RunEvent]) -> RunStatus:
    """Find out the state of a run from its events and the process that trained last."""
    last = next((event for event in reversed(events) if event.kind in _STEPPING), None)
    if last is None:
        return _by_process(folder)
    if last.kind == "end":
        reason = last.words("reason")
        return RunStatus("finished") if reason == "finished" else RunStatus("stopped", reason)
    if last.kind == "fork":
        return RunStatus("forked", "not trained yet")
    if last.kind == "error":
        return RunStatus("failed", last.words("message"))
    if last.kind == "incident":
        # The supervisor has decided; the next attempt records its start.
        return RunStatus("restarting" if last.fields.get("restart") else "failed", last.words("cause"))
    return _by_process(folder)


def _by_process(folder: Path) -> RunStatus:
    words: list[str] = []
    with suppress(OSError):
        # The run has not recorded its end, so the process in its lock file tells. The lock is not tried: that would
        # keep a run from starting.
        words = (folder / LOCK_NAME).read_text(encoding="utf-8", errors="replace").replace(",", "").split()
    if len(words) < 4 or words[0] != "pid" or not words[1].isdecimal():
        return RunStatus("killed", "no process is training in its folder")
    # A process id means nothing on another machine.
    if words[3] != socket.gethostname():
        return RunStatus("unknown", f"process {words[1]} on {words[3]} has not recorded its end")
    if is_running(int(words[1])):
        return RunStatus("running", f"process {words[1]}")
    return RunStatus("killed", f"process {words[1]} has ended without recording why")


_DEPTH = 4  # folders below the given one
_NOT_RUNS = {"checkpoints", "data", "tensorboard", "hf", "logs", "heartbeats"}  # folders in a run


@dataclass(frozen=True)
class RunSummary:
    """State of a run in a list; None for what is not known or not logged yet."""

    path: Path
    state: str  # of ``RunStatus``, or "unreadable"; "unknown" is on another machine
    reason: str  # of the state, if there is more to say
    step: int | None  # last logged one
    total_steps: int | None  # of the recipe
    loss: float | None  # in training, at the last logged step
    validation_loss: float | None  # if the last logged step has one
    tokens_per_second: float | None  # at the last logged step
    updated: datetime | None  # time of the last line or event; None if the files are empty
    tokens: int | None = None  # trained up to the last logged step
    parameters: int | None = None  # of the model, if its steps have begun


def list_runs(folder: Path) -> list[RunSummary]:
    """List the runs in a folder and below it, the last updated one first; DataError if there is no such folder."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder. Give a folder that contains runs, such as runs/.")
    found = [_summarize(path) for path in _find(folder, _DEPTH)]
    oldest = datetime.fromtimestamp(0, UTC)
    return sorted(found, key=lambda run: run.updated or oldest, reverse=True)


def _find(folder: Path, depth: int) -> list[Path]:
    # Not searched further: a run contains no other run.
    if is_run(folder):
        return [folder]
    if not depth:
        return []
    try:
        with os.scandir(folder) as entries:
            # Links are not followed: they may lead in a circle.
            names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and e.name not in _NOT_RUNS)
    except OSError:
        return []
    return [path for name in names if not name.startswith(".") for path in _find(folder / name, depth - 1)]


def _summarize(folder: Path) -> RunSummary:
    try:
        events = read_run_events(folder / "events.jsonl")
        metrics = folder / "metrics.jsonl"
        # Only its end: a list of runs has to be fast.
        last = (read_last_metrics(metrics) if metrics.is_file() else None) or {}
        status = read_status(folder, events)
    except HlatError as error:
        # One damaged run must not hide the others.
        events, last, status = [], {}, RunStatus("unreadable", str(error))
    recipe = _last_valid_recipe(events)
    return RunSummary(
        path=folder,
        state=status.state,
        reason=status.reason,
        step=_whole(last.get("step")),
        total_steps=None if recipe is None else recipe.total_steps,
        loss=number_of(last, "loss"),
        validation_loss=number_of(last, "val_loss"),
        tokens_per_second=number_of(last, "tokens_per_second"),
        updated=_updated(folder),
        tokens=_whole(last.get("tokens")),
        parameters=parameters_of(events),
    )


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def _last_valid_recipe(events: Sequence[RunEvent]) -> "Recipe | None":
    # Not at the start: an overview needs no recipe that is checked.
    from hlat.config import Recipe  # noqa: PLC0415

    recipe = last_recipe(events)
    try:
        return None if recipe is None else Recipe.model_validate(recipe)
    except ValueError:  # of a version of hlat with other fields
        return None


def _updated(folder: Path) -> datetime | None:
    times = []
    for name in _RUN_FILES:
        with suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return datetime.fromtimestamp(max(times), UTC) if times else None
