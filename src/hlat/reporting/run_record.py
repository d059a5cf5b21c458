"""Everything that a run has left in its folder, read for a report; and the wall time of every logged step.

    metrics.jsonl, events.jsonl, samples.jsonl, checkpoints --read_run--> RunRecord
    start, resume and rollback events: (step, time)  +  seconds of the phases of each line --> seconds since the start

A run may be in progress, or may have been killed: an incomplete last line is ignored, and what is missing is empty.

Lines have durations and no times, so that equal runs have equal files. A line belongs to the last event that began at
an earlier step: lines of later steps were dropped when the run went back.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from hlat.checkpoint import CheckpointEntry, list_checkpoints, open_unverified
from hlat.config import Recipe, RecipeError
from hlat.forecast import FORECAST_FILE, Forecast, forecast_json, read_forecast
from hlat.reporting.run_status import (
    RunEvent,
    RunStatus,
    forecast_event,
    is_run,
    last_recipe,
    last_stage,
    no_run,
    other_length,
    read_run_events,
    read_status,
    run_name,
)
from hlat.runtime.errors import HlatError
from hlat.tracking import GeneratedText, metrics_table, read_samples

Floats = npt.NDArray[np.float64]
Column = tuple[Floats, Floats]  # steps at which a metric was logged, and its values there
_Value = TypeVar("_Value")


def shown(value: _Value | None, form: Callable[[_Value], str], absent: str = "") -> str:
    """Format a value that may be unknown."""
    return absent if value is None else form(value)


@dataclass(frozen=True)
class RunRecord:
    """Record of a run: everything that a report shows."""

    folder: Path
    name: str  # to show; runs of one report have different names
    metrics: Mapping[str, Column]  # each at the steps that have it; the names are those of ``hlat.metrics``
    events: tuple[RunEvent, ...]  # in order of time
    settings: Mapping[str, Any]  # resolved recipe as JSON values; empty if neither an event nor a checkpoint has it
    checkpoints: tuple[CheckpointEntry, ...]  # in the folder, by step
    samples: tuple[GeneratedText, ...]  # generated texts, by step
    status: RunStatus
    notes: tuple[str, ...]  # sentences about what could not be read
    forecast: Forecast | None = None  # as it was registered; None if there is none, or it was changed

    def of_kind(self, *kinds: str) -> list[RunEvent]:
        return [event for event in self.events if event.kind in kinds]

    def last(self, name: str) -> float | None:
        """Return the last value of a metric; None if it was never logged."""
        steps, values = self.metrics.get(name, (np.empty(0), np.empty(0)))
        return float(values[-1]) if len(steps) else None

    def tokens_at_last(self, name: str) -> float | None:
        """Return the tokens where a metric was logged last; None if either was never logged."""
        found, tokens = self.metrics.get(name), self.metrics.get("tokens")
        return None if found is None or tokens is None else float(np.interp(found[0][-1], *tokens))

    @property
    def step(self) -> int:
        return int(self.last("step") or 0)

    @cached_property
    def recipe(self) -> Recipe | None:
        """The resolved recipe; None if it is unknown, or of a version of hlat with other fields."""
        try:
            recipe = Recipe.model_validate(self.settings) if self.settings else None
            if recipe is not None:
                recipe.each_stage()  # its values are of the same versions
        except (ValidationError, RecipeError):
            return None
        return recipe

    @cached_property
    def each_stage(self) -> list[Recipe]:
        """The recipes of all stages of the run; without stages its recipe, or none."""
        return [] if self.recipe is None else self.recipe.each_stage()

    @property
    def stage(self) -> Recipe | None:
        """The recipe of the stage that the run is in, or was in last; without stages that of the run."""
        name = last_stage(self.events)
        return self.recipe if self.recipe is None or not name else self.recipe.stage(name)


def read_run(folder: Path, name: str | None = None) -> RunRecord:
    """Read the record of a run, named as its recipe or folder; DataError if it is no run or a line is damaged."""
    if not is_run(folder):
        raise no_run(folder)
    notes: list[str] = []
    metrics = _read_metrics(folder / "metrics.jsonl")
    events = read_run_events(folder / "events.jsonl")
    checkpoints, settings = _read_checkpoints(folder, notes)
    settings = last_recipe(events) or settings  # a run may be resumed with changes, and checkpoint later
    if not settings:
        notes.append("The recipe is unknown: neither an event nor a checkpoint has it.")
    forecast = _read_forecast(folder, events, notes)
    if not metrics:
        notes.append("No step has been logged yet.")
    return RunRecord(
        folder=folder,
        name=name or run_name(settings, folder),
        metrics=metrics,
        events=tuple(events),
        settings=settings,
        checkpoints=tuple(checkpoints),
        samples=tuple(read_samples(folder)),
        status=read_status(folder, events),
        notes=tuple(notes),
        forecast=forecast,
    )


def _read_forecast(folder: Path, events: list[RunEvent], notes: list[str]) -> Forecast | None:
    try:
        found = read_forecast(folder)
    except HlatError as error:
        notes.append(f"The forecast is not shown: {error}")
        return None
    registered = forecast_event(events)
    if found is None:
        return None
    if registered is not None and forecast_json(found)["sha256"] != registered.fields.get("sha256"):
        reason = f"{FORECAST_FILE} is not the one that was registered {registered.when}"
    elif other := other_length(events, found.tokens):
        reason = f"it is {other}"
    else:
        return found
    notes.append(f"The forecast is not shown: {reason}.")
    return None


def _read_metrics(path: Path) -> dict[str, Column]:
    if not path.is_file():
        return {}
    table = metrics_table(path)
    if not table.num_rows:
        return {}
    steps = table.column("step").to_numpy().astype(np.float64)
    found: dict[str, Column] = {}
    for name in table.column_names:
        column = table.column(name)
        # Text and lists cannot be charted.
        if str(column.type) in ("int64", "double"):
            there = ~column.is_null().to_numpy()
            values = column.drop_null().to_numpy().astype(np.float64, copy=False)
            # The array of steps is shared by all metrics that every line has.
            found[name] = (steps if len(values) == len(steps) else steps[there], values)
    return found


def _read_checkpoints(folder: Path, notes: list[str]) -> tuple[list[CheckpointEntry], Mapping[str, Any]]:
    place = folder / "checkpoints"
    if not place.is_dir():
        return [], {}
    try:
        entries = list_checkpoints(place)
        committed = [entry for entry in entries if entry.state == "committed"]
        meta = open_unverified(Path(committed[-1].location)).meta if committed else {}
    # A note, not an error: the rest of the run can be shown.
    except (HlatError, OSError) as error:
        notes.append(f"The checkpoints cannot be read: {error}")
        return [], {}
    recipe = meta.get("run_recipe") or meta.get("recipe")
    return entries, recipe if isinstance(recipe, dict) else {}


_ANCHORS = ("start", "resume", "rollback")


def step_seconds(run: RunRecord) -> dict[str, Column]:
    """Seconds by phase, as they were logged."""
    prefix = "seconds."
    return {name.removeprefix(prefix): column for name, column in run.metrics.items() if name.startswith(prefix)}


def wall_seconds(run: RunRecord) -> Floats:
    """Seconds from the run's first start to each logged step; times at which nothing ran count too."""
    if "step" not in run.metrics:
        return np.empty(0)
    steps = run.metrics["step"][0]
    # Lines have durations and no times; events have times. So lines are counted on from the last event before them.
    durations = np.zeros(len(steps))
    for logged, values in step_seconds(run).values():
        durations[np.searchsorted(steps, logged)] += np.nan_to_num(values)
    passed = np.cumsum(durations)
    anchors = [(event.step or 0, event.time) for event in run.events if event.kind in _ANCHORS] or [(0, 0.0)]
    begin, wall = anchors[0][1], passed.copy()
    for step, time in anchors:
        # Lines after the step that the event began at; those of the same step were logged before.
        first = int(np.searchsorted(steps, step, side="right"))
        before = passed[first - 1] if first else 0.0
        wall[first:] = time - begin + passed[first:] - before
    # Durations and events have different clocks: time must not run backwards on a chart.
    return np.maximum.accumulate(wall)


def attempt_spans(run: RunRecord) -> list[tuple[float, float]]:
    """Return begin and end of each attempt, in seconds since 1970: from its start to its last event or logged step."""
    starts = [index for index, event in enumerate(run.events) if event.begins]
    wall, spans = wall_seconds(run), []
    for start, stop in pairwise([*starts, len(run.events)]):
        begin, last = run.events[start].time, run.events[stop - 1].time
        # The lines of an attempt end where the next one began; a killed process leaves lines and no event after them.
        until = (run.events[stop].step or 0) if stop < len(run.events) else np.inf
        lines = int(np.searchsorted(run.metrics["step"][0], until, side="right")) if len(wall) else 0
        logged = run.events[starts[0]].time + wall[lines - 1] if lines else begin
        spans.append((begin, float(max(begin, last, logged))))
    return spans


def active_seconds(run: RunRecord) -> float:
    """Seconds that processes of the run were running."""
    # Without events, only the logged steps are known.
    if not any(event.begins for event in run.events):
        return float(sum(np.nansum(values) for _, values in step_seconds(run).values()))
    return sum(end - begin for begin, end in attempt_spans(run))
