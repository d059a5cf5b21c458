"""Charts of a report: curves of one run or of several over each other, by tokens, steps or wall time.

    metrics by name, events -> Series, Mark, each at tokens, step and wall time -> line charts

Metrics are found by their names or prefixes: ``val/NAME/loss`` is a further validation set, ``task/NAME/METRIC`` a
task. Numbers that no chart asks for get a chart of their own, so that no logged metric is missing.
"""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from hlat.page import Band, Html, Mark, Series, grid, line_chart, time_unit
from hlat.reporting.run_record import Floats, RunRecord, step_seconds, wall_seconds

_MEMORY_METRICS = ("memory_bytes", "memory_reserved_bytes")
_MOST_SERIES = 100  # curves that a chart can show; their points are part of the page
_MOST_SETS = 8  # validation sets that are drawn over the loss; of more, the reader chooses
_NOT_CHARTED = {"step", "tokens", "samples", "batch_crc32"}  # positions and a checksum
_GIB = 1 << 30
# Events to mark on the curves: their name there, and if they get a line through the chart.
_MARKED = {
    "checkpoint": ("checkpoint", False),
    "resume": ("restart", True),
    "stage": ("stage", True),
    "anomaly": ("anomaly", True),
    "rollback": ("rollback", True),
}


class RunCharts:
    """Line charts of the runs of a report, all with the same horizontal axes, which the reader changes at once."""

    def __init__(self, runs: Sequence[RunRecord]) -> None:
        self._runs = [run for run in runs if run.metrics]
        walls = [wall_seconds(run) for run in self._runs]
        unit, size = time_unit(max((float(wall[-1]) for wall in walls if len(wall)), default=0.0))
        self._axes = ("tokens", "step", f"wall time, {unit}")
        # For each run, logged steps with the tokens and the wall time there.
        self._places = [
            (run.metrics.get("tokens", (np.zeros(1), np.zeros(1))), (run.metrics["step"][0], wall / size))
            for run, wall in zip(self._runs, walls, strict=True)
        ]

    def loss(self) -> Html:
        """Losses of training and validation, large, with what happened."""
        sets = self._matching("val/", "/loss")
        drawn = 2 * len(self._runs) if len(sets) > _MOST_SETS else None
        names, title = ["loss", "val_loss", *sets], "Loss of training and validation"
        return self._chart(title, names, "nats per token", marked=True, height=420, drawn=drawn, band=self._band())

    def _band(self) -> tuple[Band, Series] | None:
        """Range and median of the forecast of the only run, as far as it has come; None without a forecast."""
        forecast = self._runs[0].forecast if len(self._runs) == 1 else None
        if forecast is None or "tokens" not in self._runs[0].metrics:
            return None
        steps, tokens = self._runs[0].metrics["tokens"]
        fractions, reached = np.array([fraction for fraction, _ in forecast.curve]), tokens / forecast.tokens
        first, last = max(fractions[0], reached[0]), min(fractions[-1], reached[-1])
        if first >= last:
            return None
        corners = fractions[(fractions > first) & (fractions < last)]
        drawn = np.concatenate([[first], corners, [last]])
        losses = np.array([loss for _, loss in forecast.curve])
        median, low, high = (np.interp(drawn, fractions, losses[:, each]) for each in range(3))
        places = self._across(0, np.interp(drawn, reached, steps))
        return Band("forecast, 4 of 5 runs", places, low, high), Series("forecast", places, median)

    def evaluation(self) -> Html:
        """Bits per byte, other measures of validation, and scores of tasks."""
        bits = ["val_bits_per_byte", *self._matching("val/", "bits_per_byte")]
        other = [name for name in self._matching("val/", "") if name not in bits and not name.endswith("/loss")]
        tasks = self._matching("task/", "")
        sets = self._matching("val/", "/loss")
        charts = [
            self._chart("Bits per byte of held-out text", bits, "bits per byte"),
            self._chart("Loss of validation sets", sets if len(sets) > _MOST_SETS else [], "nats per token"),
            *(self._chart(_label(name), [name], _label(name)) for name in other),
        ]
        for metric in dict.fromkeys(name.rpartition("/")[2] for name in tasks):
            same = [name for name in tasks if name.rpartition("/")[2] == metric]
            charts.append(self._chart(f"Tasks: {metric}", same, metric))
        return grid(charts)

    def optimization(self) -> Html:
        """Learning rate and norms."""
        return grid(
            [
                self._chart("Learning rate", ["lr"], "learning rate", zero=True),
                self._chart("Gradient norm", ["grad_norm"], "L2 norm before clipping", marked=True),
                self._chart("Parameter norm", ["param_norm"], "L2 norm"),
            ]
        )

    def speed(self) -> Html:
        """Throughput, MFU, memory, and the phases of a step."""
        memory = "GiB, of the fullest rank"
        return grid(
            [
                self._chart("Throughput", ["tokens_per_second"], "tokens per second", zero=True, marked=True),
                self._chart("MFU", ["mfu", "mfu_full"], "% of peak FLOP/s", zero=True, factor=100.0),
                self._chart("Peak memory", _MEMORY_METRICS, memory, zero=True, factor=1 / _GIB),
                self._phases(),
            ]
        )

    def others(self) -> Html:
        """Numbers that no other chart shows."""
        charted = {"loss", "val_loss", "val_bits_per_byte", "lr", "grad_norm", "param_norm", "tokens_per_second"}
        charted |= {"mfu", "mfu_full", *_MEMORY_METRICS, *_NOT_CHARTED}
        names = [name for name in self._matching("", "") if name not in charted]
        names = [name for name in names if not name.startswith(("val/", "task/", "seconds."))]
        return grid(self._chart(name, [name], name) for name in names)

    def _phases(self) -> Html:
        # Phases of several runs could not be told apart.
        if len(self._runs) != 1:
            return Html()
        (run,), series = self._runs, []
        for name, (steps, values) in step_seconds(run).items():
            # A line has the seconds of all steps since the line before.
            lengths = np.diff(run.metrics["step"][0], prepend=0.0)
            per_step = values / np.maximum(1.0, lengths[np.searchsorted(run.metrics["step"][0], steps)])
            series.append(Series(name, self._across(0, steps), per_step))
        # The longest phase first in the legend.
        series.sort(key=lambda each: -float(np.nansum(each.y)))
        return line_chart("Time of a step by phase", series, self._axes, "seconds", zero=True)

    def _chart(
        self,
        title: str,
        names: Sequence[str],
        up: str,
        *,
        zero: bool = False,
        factor: float = 1.0,
        marked: bool = False,
        height: int = 260,
        drawn: int | None = None,
        band: tuple[Band, Series] | None = None,
    ) -> Html:
        series, labels = [], _labels(names)
        # The same metric of every run first: those are compared, and a chart draws the first curves.
        for kind, name in enumerate(names):
            for number, run in enumerate(self._runs):
                if name in run.metrics:
                    steps, values = run.metrics[name]
                    label = labels[name] if len(self._runs) == 1 else f"{run.name}: {labels[name]}"
                    # A run has one colour, a metric one pattern of dashes.
                    style = None if len(self._runs) == 1 else (number, kind)
                    series.append(Series(label, self._across(number, steps), values * factor, style))
        if len(self._runs) == 1:
            # The losses of all text, then those of its parts, by where they ended.
            whole = sum(not name.startswith("val/") for name in names if name in self._runs[0].metrics)
            series = [*series[:whole], *sorted(series[whole:], key=lambda each: -float(each.y[-1]))]
        if len(series) > _MOST_SERIES:
            title = f"{title}: {_MOST_SERIES} of {len(series):,}; metrics.jsonl has all"
        # Marks of several runs would cover one another.
        marks = self._marks() if marked and len(self._runs) == 1 else []
        shown, area = series[:_MOST_SERIES], None
        if band is not None:
            area, median = band
            shown = [*shown, median]
        return line_chart(title, shown, self._axes, up, marks=marks, band=area, zero=zero, height=height, drawn=drawn)

    def _across(self, number: int, steps: Floats) -> list[Floats]:
        # Events and evaluations may lie between logged steps.
        tokens, wall = self._places[number]
        return [np.interp(steps, *tokens), steps, np.interp(steps, *wall)]

    def _marks(self) -> list[Mark]:
        """Mark saves, restarts, anomalies and rollbacks of the only run."""
        (run,), marks = self._runs, []

        def places(step: float) -> list[float]:
            return [float(each[0]) for each in self._across(0, np.array([step]))]

        for event in run.events:
            if event.kind in _MARKED and event.step is not None:
                kind, full_height = _MARKED[event.kind]
                marks.append(Mark(places(event.step), kind, f"{kind}, step {event.step:,}, {event.when}", full_height))
        return marks

    def _matching(self, prefix: str, suffix: str) -> list[str]:
        """Names of metrics with a prefix and a suffix, in the order of their first appearance."""
        names = dict.fromkeys(name for run in self._runs for name in run.metrics)
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


def _labels(names: Sequence[str]) -> dict[str, str]:
    """Label metrics; those of validation sets without the folder with which all their names begin."""
    labels = {name: _label(name) for name in names}
    sets = {name: label for name, label in labels.items() if name.startswith("val/")}
    alike = (len(set(letters)) == 1 for letters in zip(*sets.values(), strict=False))
    first = sum(takewhile(bool, alike))
    if len(sets) < 2 or first < _LONG_SHARED or any(len(label) == first for label in sets.values()):
        return labels
    return labels | {name: label[first:] for name, label in sets.items()}


_LONG_SHARED = 16  # letters; shorter ones are left, since they may mean something


def _label(name: str) -> str:
    """Name of a metric for a legend: ``val/books/loss`` -> ``books``."""
    parts = name.split("/")
    return "/".join(parts[1:-1]) if len(parts) > 2 else _LABELS.get(name, name)
