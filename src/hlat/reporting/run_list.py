"""List of runs below a folder: state, step, loss and speed of each, read from the ends of their files.

folder -> folders with metrics.jsonl or events.jsonl -> RunSummary each
"""

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hlat.config import Recipe
from hlat.reporting.run_status import RunEvent, RunStatus, is_run, read_run_events, read_status
from hlat.runtime.errors import DataError, HlatError
from hlat.runtime.storage.run_folder import ATTEMPTS_NAME
from hlat.tracking import read_last_metrics

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
    step = last.get("step")
    return RunSummary(
        path=folder,
        state=status.state,
        reason=status.reason,
        step=step if isinstance(step, int) else None,
        total_steps=_total_steps(events),
        loss=_number(last, "loss"),
        validation_loss=_number(last, "val_loss"),
        tokens_per_second=_number(last, "tokens_per_second"),
        updated=_updated(folder),
        tokens=_whole(last.get("tokens")),
        parameters=next((_whole(event.fields.get("parameters")) for event in reversed(events) if event.begins), None),
    )


def _number(metrics: dict[str, Any], name: str) -> float | None:
    value = metrics.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def _total_steps(events: list[RunEvent]) -> int | None:
    recipe = next((event.fields["recipe"] for event in reversed(events) if event.has_recipe), None)
    try:
        return None if recipe is None else Recipe.model_validate(recipe).total_steps
    except ValueError:  # of a version of hlat with other fields
        return None


def _updated(folder: Path) -> datetime | None:
    times = []
    for name in ("metrics.jsonl", "events.jsonl", ATTEMPTS_NAME):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return datetime.fromtimestamp(max(times), UTC) if times else None
