"""Sections of a report in words: what happened, where the time went, checkpoints, samples, the recipe.

    events        -> what happened, a sentence each, repeated ones in one; attempts as a time line; all as a table
    goodput, time -> bars by what it was spent on
    samples       -> texts of one prompt side by side, from the first step to the last
    settings      -> fields of one recipe, fields in which several differ

A part without contents is left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np

from hlat.config import short
from hlat.page import (
    Html,
    Span,
    bar_chart,
    details,
    duration,
    format_value,
    grid,
    joined,
    paragraph,
    preformatted,
    section,
    table,
    time_unit,
    timeline_chart,
)
from hlat.reporting.overview import changes_text, differing_settings, family_lines, flat_settings, shown_settings
from hlat.reporting.run_record import RunRecord, attempt_spans, shown, step_seconds
from hlat.reporting.run_status import RunEvent

_MAX_ROWS = 200  # of a table; the file has all of them
_MAX_SENTENCES = 25  # about what happened
_MAX_ATTEMPTS = 20  # rows of a time line
_SAMPLES_SIDE_BY_SIDE = 3
_MAX_PROMPTS = 8
_NOT_TOLD = ("goodput", "component_begun", "export", "restart")  # said elsewhere, or of no interest when they go well
_FAILED_SAVES = ("checkpoint_failed", "checkpoint_retry", "checkpoint_damaged", "snapshot_failed")


def time_section(run: RunRecord) -> Html:
    """Show where the time went: goodput of the commands, and the phases of the steps."""
    phases = {name: float(np.nansum(values)) for name, (_, values) in step_seconds(run).items()}
    goodput = goodput_seconds(run)
    productive = goodput.get("productive", 0.0) / (sum(goodput.values()) or 1.0)
    return grid(
        [
            _time_bar(f"Goodput: {productive:.1%} of the time in useful steps", _with_words(goodput)),
            _time_bar("Time in steps, by phase", {_PHASES.get(name, name): spent for name, spent in phases.items()}),
        ]
    )


_PHASES = {"between": "between steps", "reduce": "gradient communication", "device": "waiting for the device"}


def _time_bar(title: str, parts: Mapping[str, float]) -> Html:
    unit, size = time_unit(sum(parts.values()))
    return bar_chart(title, {"": parts}, duration, unit=f"time, {unit}", scale=size)


def _with_words(goodput: Mapping[str, float]) -> dict[str, float]:
    words = {"productive": "useful steps", "lost": "lost to failures", "recovering": "restarting"}
    words |= {"waiting": "waiting for data or a restart"}
    return {words.get(part, part): seconds for part, seconds in goodput.items()}


def goodput_seconds(run: RunRecord) -> Mapping[str, float]:
    """Seconds by part over all commands of the run: each one's last account, added up."""
    total: dict[str, float] = {}
    pending: Mapping[str, float] = {}
    for event in run.of_kind("goodput"):
        seconds = event.fields.get("seconds")
        if not isinstance(seconds, dict):
            continue
        # An account replaces the one before of the same command; a killed command has no final one.
        pending = {str(name): float(value) for name, value in seconds.items() if isinstance(value, (int, float))}
        if event.fields.get("final"):
            total, pending = _added(total, pending), {}
    return _added(total, pending)


def _added(one: Mapping[str, float], two: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + two.get(name, 0.0) for name in dict.fromkeys([*one, *two])}


def incidents_section(run: RunRecord) -> Html:
    """Tell what happened, in sentences; then attempts as a time line, and all events in a table."""
    told = [event for event in run.events if event.kind not in _NOT_TOLD]
    if not told:
        return Html()
    rows = [_sentence(list(alike), told[0].time) for _, alike in groupby(told, key=_likeness)]
    names = ("time since start", "step", "what happened")
    caption = (
        "Checkpoints and anomalies in a row are one line"
        if len(rows) <= _MAX_SENTENCES
        else f"The last {_MAX_SENTENCES} of {len(rows):,}"
    )
    recorded = f"{_caption_with_count('Events', len(run.events))} as recorded"
    return joined(
        [
            _attempts_chart(run),
            table(names, rows[-_MAX_SENTENCES:], caption=caption),
            details(recorded, _events_table("Events", run.events)),
        ]
    )


def _likeness(event: RunEvent) -> str:
    # These come by the hundred: those in a row are one sentence.
    return event.kind if event.kind in ("checkpoint", "anomaly", "slow_rank") else f"{event.kind} {id(event)}"


def _sentence(events: Sequence[RunEvent], begin: float) -> tuple[str, str, str]:
    """Tell when, at which step and what: of one event, or of several alike."""
    event, count = events[-1], len(events)
    words = _TOLD.get(event.kind, _told_otherwise)(event)
    if count > 1 and event.kind == "checkpoint":
        words = f"{count:,} checkpoints, the last {words.removeprefix('Checkpoint, ')}"
    elif count > 1:
        kind = "slow ranks" if event.kind == "slow_rank" else "anomalies"
        words = f"{count:,} {kind}, the last: {words}"
    return duration(max(0.0, event.time - begin)), shown(event.step, "{:,}".format), words


def _told_start(event: RunEvent) -> str:
    count = int(event.number("processes") or 1)
    where = f" on {count} × {event.words('device')}" if event.words("device") else ""
    before = "Started" if event.kind == "start" else f"Resumed from step {event.step or 0:,}"
    changes = changes_text(event.fields.get("changes"))
    return f"{before}{where}" + (f", with {changes}" if changes else "")


def _told_incident(event: RunEvent) -> str:
    rank = event.fields.get("rank")
    who = "" if rank is None else f"Rank {rank}: "
    after = "; restarted" if event.fields.get("restart") else f"; not restarted: {event.words('decision')}"
    return f"{who}{event.words('cause') or event.words('kind')}{after.removesuffix(': ')}"


def _told_save(event: RunEvent) -> str:
    return "Checkpoint" + shown(event.number("seconds"), lambda seconds: f", written in {duration(seconds)}")


def _told_anomaly(event: RunEvent) -> str:
    numbers = [
        f"{label} {_event_number(event, name)}"
        for name, label in (("loss", "loss"), ("grad_norm", "gradient norm"))
        if event.fields.get(name) not in (None, "")
    ]
    action = _ACTIONS.get(event.words("action"), event.words("action"))
    return f"{event.words('kind').replace('_', ' ').capitalize()}, {action}: " + "; ".join(
        [*numbers, event.words("reason")]
    )


def _told_otherwise(event: RunEvent) -> str:
    return ": ".join(filter(None, (event.kind.replace("_", " ").capitalize(), _described(event))))


_ACTIONS = {"warn": "applied", "skip": "step skipped", "rollback": "rolled back", "stop": "run stopped"}
_TOLD: dict[str, Callable[[RunEvent], str]] = {
    "fork": lambda event: next(family_lines(event, ())).replace("forked", "Forked", 1),
    "start": _told_start,
    "resume": _told_start,
    "stage": lambda event: f"Stage {event.words('stage')} began",
    "incident": _told_incident,
    "checkpoint": _told_save,
    "anomaly": _told_anomaly,
    "slow_rank": lambda event: (
        f"Rank {event.fields.get('rank')} took {_event_number(event, 'factor')} times as long as the others, "
        f"mostly in {event.words('phase')}"
    ),
    "rollback": lambda event: f"Went back from step {event.words('undone')} to step {event.step or 0:,}",
    "end": lambda event: f"Ended: {event.words('reason')}",
    "error": lambda event: f"Failed: {event.words('message')}",
}
"""Sentence about an event, by its kind; others are told by their fields."""


def _attempts_chart(run: RunRecord) -> Html:
    """Draw the attempts below each other; a single one needs no picture."""
    spans = attempt_spans(run)
    if len(spans) < 2:
        return Html()
    unit, size = time_unit(spans[-1][1] - spans[0][0])
    first = max(0, len(spans) - _MAX_ATTEMPTS)
    boxes = []
    for number, (begin, end) in enumerate(spans[first:], first):
        start, stop = (begin - spans[0][0]) / size, (end - spans[0][0]) / size
        row = f"attempt {number + 1}"
        boxes.append(Span(row, "running", start, stop, f"{row}: {duration(end - begin)}"))
        for event in run.of_kind("checkpoint"):
            if begin <= event.time <= end:
                at = (event.time - spans[0][0]) / size
                # As wide as a pixel or two: a save in the background has no length of its own.
                wide = (spans[-1][1] - spans[0][0]) / size / 400
                boxes.append(Span(row, "checkpoint", at - wide, at, f"checkpoint, step {event.step or 0:,}"))
    return timeline_chart("Attempts", boxes, f"wall time, {unit}", kinds=("running", "checkpoint"))


def _event_number(event: RunEvent, name: str) -> str:
    value = event.number(name)
    # NaN and infinity are recorded as text.
    return str(event.fields.get(name, "")) if value is None else format_value(value)


def _caption_with_count(title: str, count: int) -> str:
    return title if count <= _MAX_ROWS else f"{title}: the last {_MAX_ROWS} of {count:,}"


def _events_table(title: str, events: Sequence[RunEvent]) -> Html:
    last = events[-_MAX_ROWS:]
    rows = [(event.kind, event.when, shown(event.step, "{:,}".format), _described(event)) for event in last]
    return table(("event", "time, UTC", "step", "details"), rows, caption=_caption_with_count(title, len(events)))


def _described(event: RunEvent) -> str:
    # Columns of their own; the recipe has a part.
    known = {"time", "event", "step", "recipe"}
    return "; ".join(
        f"{name.replace('_', ' ')}: {_plain(value)}"
        for name, value in event.fields.items()
        if name not in known and value not in (None, "", [], {})
    )


def _plain(value: object) -> str:
    """Write a value of JSON as people do: a list with commas, a mapping as ``name value``."""
    if isinstance(value, dict):
        return changes_text([value]) or ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    if isinstance(value, list):
        return changes_text(value) or ", ".join(map(_plain, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_value(value) if isinstance(value, float) else str(value)


def checkpoints_section(run: RunRecord) -> Html:
    """List the checkpoints in the folder, and saves that failed."""
    # A step saved again after a rollback has the times of its last save.
    saved = {event.step: event for event in run.of_kind("checkpoint")}
    contents, rows = [], []
    for entry in run.checkpoints[-_MAX_ROWS:]:
        event = saved.get(entry.step)
        times = (None if event is None else event.number(name) for name in ("seconds", "stall_seconds"))
        rows.append(
            (
                entry.name,
                entry.state,
                shown(entry.saved, "{:%Y-%m-%d %H:%M:%S}".format),
                shown(entry.tokens, "{:,}".format),
                f"{entry.bytes / 1e6:,.1f}",
                *(shown(each, duration) for each in times),
            )
        )
    if rows:
        names = ("checkpoint", "state", "saved, UTC", "tokens", "MB", "written in", "training waited")
        caption = _caption_with_count("Checkpoints in the folder", len(run.checkpoints))
        contents.append(table(names, rows, caption=caption))
    if failed := run.of_kind(*_FAILED_SAVES):
        contents.append(_events_table("Saves that failed, and damage", failed))
    return joined(contents)


def samples_section(run: RunRecord) -> Html:
    """Show generated texts of each prompt side by side: of the first step, one between, and the last."""
    return joined(_samples(run))


def _samples(run: RunRecord) -> Iterator[Html]:
    prompts = dict.fromkeys(sample.prompt for sample in run.samples)
    for prompt in list(prompts)[:_MAX_PROMPTS]:
        found = sorted((sample for sample in run.samples if sample.prompt == prompt), key=lambda sample: sample.step)
        chosen = np.unique(np.linspace(0, len(found) - 1, min(len(found), _SAMPLES_SIDE_BY_SIDE)).round().astype(int))
        yield paragraph(f"After the prompt “{prompt}”:" if prompt else "Without a prompt:")
        yield grid(
            section(
                f"Step {found[at].step:,}",
                [preformatted(found[at].text, f"Sample of step {found[at].step}")],
                level=4,
            )
            for at in chosen.tolist()
        )
    if len(prompts) > _MAX_PROMPTS:
        yield paragraph(f"samples.jsonl has {len(prompts) - _MAX_PROMPTS:,} more prompts.")


def recipe_section(run: RunRecord) -> Html:
    """Show the resolved recipe, and the changes with which the run was resumed."""
    contents = []
    changes = [
        (str(change.get("path")), f"{event.step or 0:,}", *(short(change.get(name)) for name in ("old", "new")))
        for event in run.of_kind("resume")
        for change in event.fields.get("changes") or ()
        if isinstance(change, dict)
    ]
    if changes:
        columns = ("field", "resumed at step", "before", "after")
        contents.append(table(columns, changes, caption="Changes of the recipe while resuming"))
    if run.settings:
        rows, more = shown_settings(flat_settings(run.settings))
        rows += [("...", more)] if more else []
        contents.append(table(("field", "value"), rows, caption="Resolved recipe"))
    return joined(contents)


def recipe_diff_section(runs: Sequence[RunRecord]) -> Html:
    """Show the fields in which the recipes of several runs differ; empty for one run."""
    if len(runs) < 2:
        return Html()
    differing, more = shown_settings(differing_settings([run.settings for run in runs]))
    rows = [(name, *(shown(value, str, "not in this recipe") for value in values)) for name, values in differing]
    rows += [("...", more, *("" for _ in runs[1:]))] if more else []
    names = ("field", *(run.name for run in runs))
    contents = [table(names, rows, caption="Fields in which the recipes differ")] if rows else []
    return section("What differs", contents or [paragraph("The recipes are equal.")])
