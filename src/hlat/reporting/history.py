"""What happened in a run: time by what it was spent on, restarts, anomalies, checkpoints, samples of text.

RunRecord -> sections of the report; what did not happen is said in a sentence
"""

from collections.abc import Iterator, Mapping

import numpy as np

from hlat.page import (
    Html,
    bar_chart,
    details,
    duration,
    format_value,
    grid,
    paragraph,
    preformatted,
    section,
    table,
    time_unit,
)
from hlat.reporting.events import RunEvent
from hlat.reporting.run_record import RunRecord
from hlat.reporting.wall_clock import step_seconds

_MAX_ROWS = 200  # of a table; the file has all of them
_RESTARTS = ("start", "resume", "incident", "hang", "restart", "resized", "slow_rank", "corruption", "error", "end")
_FAILED_SAVES = ("checkpoint_failed", "checkpoint_retry", "checkpoint_damaged", "snapshot_failed")


def time_section(run: RunRecord) -> Html:
    """Show where the time went: goodput of the commands, and the phases of the steps."""
    phases = {name: float(np.nansum(values)) for name, (_, values) in step_seconds(run).items()}
    goodput = goodput_seconds(run)
    productive = goodput.get("productive", 0.0) / (sum(goodput.values()) or 1.0)
    contents = [
        grid(
            [
                _time_bar(f"Goodput: {productive:.1%} productive", goodput),
                _time_bar("Where the time of steps went", phases),
            ]
        )
    ]
    if not goodput:
        contents.append(
            paragraph("Goodput is recorded by the supervisor of `hlat train`, which this run did not have.")
        )
    if not phases:
        contents.append(paragraph("No line of metrics has the times of its steps yet."))
    return section("Time", contents, level=3)


def _time_bar(title: str, parts: Mapping[str, float]) -> Html:
    unit, size = time_unit(sum(parts.values()))
    return bar_chart(title, parts, duration, unit=unit, scale=size)


def goodput_seconds(run: RunRecord) -> Mapping[str, float]:
    """Return seconds by part over all commands of the run: each one's last account, added up."""
    total: dict[str, float] = {}
    pending: Mapping[str, float] = {}
    for event in run.of_kind("goodput"):
        seconds = event.fields.get("seconds")
        if not isinstance(seconds, dict):
            continue
        pending = {str(name): float(value) for name, value in seconds.items() if isinstance(value, (int, float))}
        if event.fields.get("final"):
            total, pending = _added(total, pending), {}
    return _added(total, pending)


def _added(one: Mapping[str, float], two: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + two.get(name, 0.0) for name in dict.fromkeys([*one, *two])}


def incidents_section(run: RunRecord) -> Html:
    """List starts, restarts and their reasons; then anomalies and their verdicts."""
    happened = run.of_kind(*_RESTARTS)
    anomalies = run.of_kind("anomaly", "rollback")
    contents = [_event_table("Starts, restarts and ends", happened)] if happened else []
    if anomalies:
        rows = [
            (
                f"{event.step:,}" if event.step is not None else "",
                event.when,
                event.words("kind") or event.kind,
                event.words("action") or f"back from step {event.words('undone')}",
                _number(event, "loss"),
                _number(event, "grad_norm"),
                event.words("reason"),
            )
            for event in anomalies[-_MAX_ROWS:]
        ]
        names = ("step", "time, UTC", "kind", "verdict", "loss", "gradient norm", "reason")
        contents.append(table(names, rows, caption=_caption("Anomalies and their verdicts", len(anomalies))))
    else:
        contents.append(paragraph("No step had a loss or gradient norm that is not finite, or a spike."))
    return section("What happened", contents, level=3)


def _number(event: RunEvent, name: str) -> str:
    value = event.number(name)
    return str(event.fields.get(name, "")) if value is None else format_value(value)


def _caption(title: str, count: int) -> str:
    return title if count <= _MAX_ROWS else f"{title}: the last {_MAX_ROWS} of {count:,}"


def _event_table(caption: str, events: list[RunEvent]) -> Html:
    rows = [
        (event.kind, event.when, "" if event.step is None else f"{event.step:,}", _described(event))
        for event in events[-_MAX_ROWS:]
    ]
    return table(("event", "time, UTC", "step", "details"), rows, caption=_caption(caption, len(events)))


def _described(event: RunEvent) -> str:
    """Return all other fields of an event as text; the recipe has a section of its own."""
    known = {"time", "event", "step", "recipe"}
    return "; ".join(
        f"{name.replace('_', ' ')}: {value}"
        for name, value in event.fields.items()
        if name not in known and value not in (None, "", [], {})
    )


def checkpoints_section(run: RunRecord) -> Html:
    """List the checkpoints in the folder, and saves that failed."""
    saved = {event.step: event for event in run.of_kind("checkpoint")}
    contents = []
    if run.checkpoints:
        rows = []
        for entry in run.checkpoints[-_MAX_ROWS:]:
            event = saved.get(entry.step)
            seconds = None if event is None else event.number("seconds")
            stall = None if event is None else event.number("stall_seconds")
            rows.append(
                (
                    entry.name,
                    entry.state,
                    "" if entry.saved is None else f"{entry.saved:%Y-%m-%d %H:%M:%S}",
                    "" if entry.tokens is None else f"{entry.tokens:,}",
                    f"{entry.bytes / 1e6:,.1f}",
                    "" if seconds is None else duration(seconds),
                    "" if stall is None else duration(stall),
                )
            )
        names = ("checkpoint", "state", "saved, UTC", "tokens", "MB", "written in", "training waited")
        caption = _caption("Checkpoints in the folder", len(run.checkpoints))
        contents.append(table(names, rows, caption=caption))
    else:
        contents.append(paragraph("There is no checkpoint in the folder."))
    if failed := run.of_kind(*_FAILED_SAVES):
        contents.append(_event_table("Saves that failed, and damage", failed))
    return section("Checkpoints", contents, level=3)


def samples_section(run: RunRecord) -> Html:
    """Show generated texts, the newest first."""
    if not run.samples:
        return section("Samples of text", [paragraph("The run has no samples of generated text.")], level=3)
    return section("Samples of text", list(_samples(run)), level=3)


def _samples(run: RunRecord) -> Iterator[Html]:
    ordered = sorted(run.samples, key=lambda sample: -sample.step)
    for number, sample in enumerate(ordered[:_MAX_ROWS]):
        shown = preformatted(sample.prompt + sample.text, f"Sample of step {sample.step}")
        title = f"Step {sample.step:,}, from the prompt {sample.prompt!r}"
        yield paragraph(title) + shown if number == 0 else details(title, shown)
