"""Charts of one run, or of several runs over each other.

    metrics by name, events -> Series by step, tokens or wall time, Mark -> line charts

Metrics are found by their names or prefixes: ``val/NAME/loss`` is a further validation set, ``task/NAME/METRIC`` a
task. Numbers that no chart asks for get a chart of their own, so that no logged metric is missing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hlat.page import Html, Mark, Series, grid, line_chart, paragraph, section, time_unit
from hlat.reporting.run_record import Column, Floats, RunRecord
from hlat.reporting.wall_clock import step_seconds, wall_seconds

_MEMORY = ("memory_bytes", "memory_reserved_bytes")
_NOT_CHARTED = {"step", "tokens", "samples", "batch_crc32"}  # positions and a checksum
_GIB = 1 << 30
_MARKED = {
    "checkpoint": ("checkpoint", False),
    "resume": ("restart", True),
    "anomaly": ("anomaly", True),
    "rollback": ("rollback", True),
}
"""Events to mark on the curves: their name there, and if they get a line through the chart."""


@dataclass(frozen=True)
class _Scale:
    """A horizontal axis: its label, and the values of the logged steps of a run."""

    label: str
    places: Callable[[RunRecord], Column]


def _tokens(run: RunRecord) -> Column:
    return run.metrics.get("tokens", (np.empty(0), np.empty(0)))


def _time_scale(runs: Sequence[RunRecord]) -> _Scale:
    longest = max((float(wall[-1]) for run in runs if len(wall := wall_seconds(run))), default=0.0)
    name, unit = time_unit(longest)
    return _Scale(f"wall time, {name}", lambda run: (run.metrics["step"][0], wall_seconds(run) / unit))


def loss_section(runs: Sequence[RunRecord]) -> Html:
    """Show losses by tokens and by wall time, bits per byte, and scores of tasks."""
    logged = [run for run in runs if run.metrics]
    by_tokens, by_time = _Scale("tokens", _tokens), _time_scale(logged)
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
        _chart("Peak memory", logged, [*_MEMORY], steps, "GiB, of the fullest rank", zero=True, factor=1 / _GIB),
        _phases_chart(logged),
    ]
    charted = {"loss", "val_loss", "val_bits_per_byte", "lr", "grad_norm", "param_norm", "tokens_per_second", "mfu"}
    charted |= {"mfu_full", *_MEMORY, *_NOT_CHARTED}
    rest = dict.fromkeys(name for run in logged for name in run.metrics)
    others = [name for name in rest if name not in charted and not name.startswith(("val/", "task/", "seconds."))]
    charts += [_chart(name, logged, [name], steps, name) for name in others]
    return section("Training", [grid(charts)])


def _phases_chart(runs: Sequence[RunRecord]) -> Html:
    """Seconds per step by phase, of a single run; those of several runs would not be told apart."""
    if len(runs) != 1:
        return ""
    series = []
    for name, (steps, values) in step_seconds(runs[0]).items():
        lengths = np.diff(runs[0].metrics["step"][0], prepend=0.0)
        per_step = values / np.maximum(1.0, lengths[np.searchsorted(runs[0].metrics["step"][0], steps)])
        series.append(Series(name, steps, per_step))
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
    marks = _run_marks(runs[0], scale.places(runs[0])) if marked and len(runs) == 1 else []
    return line_chart(title, series, scale.label, up, marks=marks, zero=zero)


def _placed(steps: Floats, places: Column) -> Floats:
    """Return the positions of some steps on the horizontal axis; between logged steps they are interpolated."""
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
    """Return the names of metrics with a prefix and a suffix, in the order of their first appearance."""
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
    """Return the name of a metric for a legend: ``val/books/loss`` -> ``books``."""
    parts = name.split("/")
    return "/".join(parts[1:-1]) if len(parts) > 2 else _LABELS.get(name, name)
