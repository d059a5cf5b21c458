"""Sections of a report: charts of one run or of several over each other, the history of a run, its recipe.

    metrics by name, events -> Series by step, tokens or wall time, Mark -> line charts         loss, training
    RunRecord -> time by what it was spent on, restarts and anomalies, checkpoints, samples     history
    settings of each run -> fields of one recipe, fields in which several differ                recipes

Metrics are found by their names or prefixes: ``val/NAME/loss`` is a further validation set, ``task/NAME/METRIC`` a
task. Numbers that no chart asks for get a chart of their own, so that no logged metric is missing. What did not happen
is said in a sentence.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hlat.config import short
from hlat.page import (
    Html,
    Mark,
    Series,
    bar_chart,
    details,
    duration,
    format_value,
    grid,
    line_chart,
    paragraph,
    preformatted,
    section,
    table,
    time_unit,
)
from hlat.reporting.overview import differing_settings, flat_settings, shown_settings
from hlat.reporting.run_record import Column, Floats, RunRecord, shown, step_seconds, wall_seconds
from hlat.reporting.run_status import RunEvent

_MEMORY_METRICS = ("memory_bytes", "memory_reserved_bytes")
_MOST_SERIES = 8  # curves of a chart that can be told apart
_NOT_CHARTED = {"step", "tokens", "samples", "batch_crc32"}  # positions and a checksum
_GIB = 1 << 30
# Events to mark on the curves: their name there, and if they get a line through the chart.
_MARKED = {
    "checkpoint": ("checkpoint", False),
    "resume": ("restart", True),
    "anomaly": ("anomaly", True),
    "rollback": ("rollback", True),
}


@dataclass(frozen=True)
class _Scale:
    """A horizontal axis: its label, and the values of the logged steps of a run."""

    label: str
    places: Callable[[RunRecord], Column]


def _time_scale(runs: Sequence[RunRecord]) -> _Scale:
    longest = max((float(wall[-1]) for run in runs if len(wall := wall_seconds(run))), default=0.0)
    name, unit = time_unit(longest)
    return _Scale(f"wall time, {name}", lambda run: (run.metrics["step"][0], wall_seconds(run) / unit))


def loss_section(runs: Sequence[RunRecord]) -> Html:
    """Show losses by tokens and by wall time, bits per byte, and scores of tasks."""
    logged = [run for run in runs if run.metrics]
    by_tokens = _Scale("tokens", lambda run: run.metrics.get("tokens", (np.empty(0), np.empty(0))))
    by_time = _time_scale(logged)
    names = ["loss", "val_loss", *_matching(logged, "val/", "/loss")]
    bits = ["val_bits_per_byte", *_matching(logged, "val/", "bits_per_byte")]
    other = [name for name in _matching(logged, "val/", "") if name not in {*names, *bits}]
    charts = [
        _chart("Loss by tokens", logged, names, by_tokens, "nats per token", marked=True),
        _chart("Loss by wall time", logged, names, by_time, "nats per token", marked=True),
        _chart("Bits per byte of held-out text", logged, bits, by_tokens, "bits per byte"),
        *(_chart(_label(name), logged, [name], by_tokens, _label(name)) for name in other),
    ]
    tasks = _matching(logged, "task/", "")
    for metric in dict.fromkeys(name.rpartition("/")[2] for name in tasks):
        same = [name for name in tasks if name.rpartition("/")[2] == metric]
        charts.append(_chart(f"Tasks: {metric}", logged, same, by_tokens, metric))
    contents = [grid(charts)]
    if not tasks:
        contents.append(paragraph("No task was scored during training."))
    return section("Loss", contents)


def training_section(runs: Sequence[RunRecord]) -> Html:
    """Show learning rate, norms, throughput, MFU and memory, and all metrics that no other chart shows."""
    logged = [run for run in runs if run.metrics]
    steps = _Scale("step", lambda run: run.metrics["step"])
    charts = [
        _chart("Learning rate", logged, ["lr"], steps, "learning rate", zero=True),
        _chart("Gradient norm", logged, ["grad_norm"], steps, "L2 norm before clipping", marked=True),
        _chart("Parameter norm", logged, ["param_norm"], steps, "L2 norm"),
        _chart("Throughput", logged, ["tokens_per_second"], steps, "tokens per second", zero=True, marked=True),
        _chart("MFU", logged, ["mfu", "mfu_full"], steps, "% of peak FLOP/s", zero=True, factor=100.0),
        _chart(
            "Peak memory", logged, [*_MEMORY_METRICS], steps, "GiB, of the fullest rank", zero=True, factor=1 / _GIB
        ),
        _phases_chart(logged),
    ]
    charted = {"loss", "val_loss", "val_bits_per_byte", "lr", "grad_norm", "param_norm", "tokens_per_second", "mfu"}
    charted |= {"mfu_full", *_MEMORY_METRICS, *_NOT_CHARTED}
    rest = dict.fromkeys(name for run in logged for name in run.metrics)
    # Numbers that no chart asks for: no logged metric is missing.
    others = [name for name in rest if name not in charted and not name.startswith(("val/", "task/", "seconds."))]
    charts += [_chart(name, logged, [name], steps, name) for name in others]
    return section("Training", [grid(charts)])


def _phases_chart(runs: Sequence[RunRecord]) -> Html:
    # Phases of several runs could not be told apart.
    if len(runs) != 1:
        return ""
    series = []
    for name, (steps, values) in step_seconds(runs[0]).items():
        # A line has the seconds of all steps since the line before.
        lengths = np.diff(runs[0].metrics["step"][0], prepend=0.0)
        per_step = values / np.maximum(1.0, lengths[np.searchsorted(runs[0].metrics["step"][0], steps)])
        series.append(Series(name, steps, per_step))
    # The longest phase first in the legend.
    series.sort(key=lambda each: -float(np.nansum(each.y)))
    return line_chart("Time of a step by phase", series, "step", "seconds", zero=True)


def _chart(
    title: str,
    runs: Sequence[RunRecord],
    names: Sequence[str],
    scale: _Scale,
    up: str,
    *,
    zero: bool = False,
    factor: float = 1.0,
    marked: bool = False,
) -> Html:
    series = []
    for run in runs:
        places = scale.places(run)
        for name in names:
            if name in run.metrics and len(places[0]):
                steps, values = run.metrics[name]
                label = _label(name) if len(runs) == 1 else f"{run.name}: {_label(name)}"
                series.append(Series(label, _placed(steps, places), values * factor))
    if len(series) > _MOST_SERIES:
        title = f"{title}: {_MOST_SERIES} of {len(series):,}, the highest; metrics.jsonl has all"
        # The first are the losses of all text; the others by where they ended.
        chosen = [*series[:2], *sorted(series[2:], key=lambda each: -float(each.y[-1]))][:_MOST_SERIES]
        series = [each for each in series if any(each is one for one in chosen)]
    # Marks of several runs would cover one another.
    marks = _run_marks(runs[0], scale.places(runs[0])) if marked and len(runs) == 1 else []
    return line_chart(title, series, scale.label, up, marks=marks, zero=zero)


def _placed(steps: Floats, places: Column) -> Floats:
    # Events and evaluations may lie between logged steps.
    return np.interp(steps, places[0], places[1])


def _run_marks(run: RunRecord, places: Column) -> list[Mark]:
    """Mark checkpoints, evaluations, restarts, anomalies and rollbacks."""
    if not len(places[0]):
        return []
    marks = []
    for event in run.events:
        if event.kind in _MARKED and event.step is not None:
            kind, full_height = _MARKED[event.kind]
            place = float(_placed(np.array([float(event.step)]), places)[0])
            marks.append(Mark(place, kind, f"{kind}, step {event.step:,}, {event.when}", full_height))
    for step in sorted(_evaluated_steps(run.metrics)):
        place = float(_placed(np.array([step]), places)[0])
        marks.append(Mark(place, "evaluation", f"evaluation, step {step:,.0f}"))
    return marks


def _evaluated_steps(metrics: Mapping[str, Column]) -> set[float]:
    names = [name for name in metrics if name.startswith(("val_loss", "val/", "task/"))]
    return {float(step) for name in names for step in metrics[name][0]}


def _matching(runs: Sequence[RunRecord], prefix: str, suffix: str) -> list[str]:
    """Names of metrics with a prefix and a suffix, in the order of their first appearance."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    return [name for name in names if name.startswith(prefix) and name.endswith(suffix)]


_LABELS = {
    "loss": "training",
    "val_loss": "validation",
    "val_bits_per_byte": "validation",
    "grad_norm": "gradient",
    "param_norm": "parameters",
    "lr": "learning rate",
    "mfu": "attention counted as causal",
    "mfu_full": "attention counted in full",
    "memory_bytes": "peak memory",
    "memory_reserved_bytes": "reserved by the allocator",
    "tokens_per_second": "tokens per second",
}


def _label(name: str) -> str:
    """Name of a metric for a legend: ``val/books/loss`` -> ``books``."""
    parts = name.split("/")
    return "/".join(parts[1:-1]) if len(parts) > 2 else _LABELS.get(name, name)


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
    """List starts, restarts and their reasons; then anomalies and their verdicts."""
    happened = run.of_kind(*_RESTARTS)
    anomalies = run.of_kind("anomaly", "rollback")
    contents = [_event_table("Starts, restarts and ends", happened)] if happened else []
    if anomalies:
        rows = [
            (
                shown(event.step, "{:,}".format),
                event.when,
                event.words("kind") or event.kind,
                event.words("action") or f"back from step {event.words('undone')}",
                _event_number(event, "loss"),
                _event_number(event, "grad_norm"),
                event.words("reason"),
            )
            for event in anomalies[-_MAX_ROWS:]
        ]
        names = ("step", "time, UTC", "kind", "verdict", "loss", "gradient norm", "reason")
        contents.append(table(names, rows, caption=_caption_with_count("Anomalies and their verdicts", len(anomalies))))
    else:
        contents.append(paragraph("No step had a loss or gradient norm that is not finite, or a spike."))
    return section("What happened", contents, level=3)


def _event_number(event: RunEvent, name: str) -> str:
    value = event.number(name)
    # NaN and infinity are recorded as text.
    return str(event.fields.get(name, "")) if value is None else format_value(value)


def _caption_with_count(title: str, count: int) -> str:
    return title if count <= _MAX_ROWS else f"{title}: the last {_MAX_ROWS} of {count:,}"


def _event_table(caption: str, events: list[RunEvent]) -> Html:
    rows = [
        (event.kind, event.when, shown(event.step, "{:,}".format), _described(event)) for event in events[-_MAX_ROWS:]
    ]
    return table(("event", "time, UTC", "step", "details"), rows, caption=_caption_with_count(caption, len(events)))


def _described(event: RunEvent) -> str:
    # Columns of their own; the recipe has a section.
    known = {"time", "event", "step", "recipe"}
    return "; ".join(
        f"{name.replace('_', ' ')}: {value}"
        for name, value in event.fields.items()
        if name not in known and value not in (None, "", [], {})
    )


def checkpoints_section(run: RunRecord) -> Html:
    """List the checkpoints in the folder, and saves that failed."""
    # A step saved again after a rollback has the times of its last save.
    saved = {event.step: event for event in run.of_kind("checkpoint")}
    contents = []
    if run.checkpoints:
        rows = []
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
        names = ("checkpoint", "state", "saved, UTC", "tokens", "MB", "written in", "training waited")
        caption = _caption_with_count("Checkpoints in the folder", len(run.checkpoints))
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
        # The newest is open, the others are folded.
        yield paragraph(title) + shown if number == 0 else details(title, shown)


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
        contents.append(details("Resolved recipe", table(("field", "value"), rows, caption="Resolved recipe")))
    else:
        contents.append(paragraph("The resolved recipe is unknown."))
    return section("Recipe", contents, level=3)


def recipe_diff_section(runs: Sequence[RunRecord]) -> Html:
    """Show the fields in which the recipes of several runs differ; empty for one run."""
    if len(runs) < 2:
        return ""
    differing, more = shown_settings(differing_settings([run.settings for run in runs]))
    rows = [(name, *(shown(value, str, "not in this recipe") for value in values)) for name, values in differing]
    rows += [("...", more, *("" for _ in runs[1:]))] if more else []
    names = ("field", *(run.name for run in runs))
    contents = [table(names, rows, caption="Fields in which the recipes differ")] if rows else []
    return section("Recipe diff", contents or [paragraph("The recipes are equal.")])
