"""Console output of a run, for terminals, log files and log collectors.

metrics --named_values, duration, rate, size--> text for people
metrics, eta -> one line per logged step           (plain: files, pipes, schedulers)
-> the same lines, and one at the bottom that every step and pause redraws   (rich: terminals)
fields, each with its rank --fit--> the columns of the terminal: the least important are left out
-> one JSON object per step, message and event   (json: log collectors, docs/operators.md)
"""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TextIO

from rich.cells import cell_len, set_cell_size

from hlat.config import TrackingConfig
from hlat.runtime.logs import json_line, print_json_lines
from hlat.runtime.progress import observe_stages
from hlat.runtime.terminal import BottomLine, columns, draws_lines, escape_controls, open_line, spinner, writes_unicode
from hlat.tracking.jsonl import to_json_value
from hlat.tracking.records import Metrics

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_GIB, _MIB = 1 << 30, 1 << 20


def progress(step: int, total_steps: int, eta_seconds: float | None) -> str:
    """Format step, share of the run and time left."""
    eta = "-" if eta_seconds is None else duration(eta_seconds)
    return f"step {step}/{total_steps}  {step / total_steps:.1%}  eta {eta}"


# In the order of interest: a terminal of 80 columns shows the bar up to mfu.
_FORMATS: dict[str, Callable[[float], str]] = {
    "tokens_per_second": lambda value: f"{rate(value)} tok/s",
    "mfu": lambda value: f"mfu {value:.1%}",
    "grad_norm": lambda value: f"gnorm {value:.2f}",
    "lr": lambda value: f"lr {value:.2e}",
    "memory_bytes": lambda value: f"mem {size(value)}",
}


def values(metrics: Metrics) -> str:
    """Format the main metrics of a step, in a fixed order; missing ones are left out."""
    return "  ".join(text for _, text in named_values(metrics))


def named_values(metrics: Metrics) -> list[tuple[str, str]]:
    """Return name and text of the main metrics that a step has, in a fixed order."""
    found = [("loss", f"loss {metrics['loss']:.4f}")] if "loss" in metrics else []
    if "val_loss" in metrics:
        bits = f" (bpb {metrics['val_bits_per_byte']:.4f})" if "val_bits_per_byte" in metrics else ""
        found.append(("val_loss", f"val {metrics['val_loss']:.4f}{bits}"))
    for key, value in metrics.items():
        if key.startswith("val/") and key.endswith("/loss") and key.count("/") == 2:  # not each source of the split
            found.append((key, f"val {key.split('/')[1]} {value:.4f}"))
        elif key.startswith("task/") and key.endswith("/acc"):
            found.append((key, f"{key.split('/')[1]} {value:.1%}"))
    return found + [(key, form(metrics[key])) for key, form in _FORMATS.items() if key in metrics]


def duration(seconds: float) -> str:
    """Format seconds as ``0:03:12``, or ``2d 04:00:00`` from a day on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour:02}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"


def rate(value: float) -> str:
    """Format a number with an SI prefix, as ``12.3k``; NaN and infinity by name."""
    if not math.isfinite(value):
        return str(value)
    # Chosen after rounding, so that 999,960 is 1.0M and not 1000.0k.
    return next((f"{value / unit:.1f}{prefix}" for unit, prefix in _SI if value >= 0.99995 * unit), f"{value:.0f}")


def size(count: float) -> str:
    """Format bytes as ``1.2G`` (GiB) or ``812M`` (MiB)."""
    return f"{count / _GIB:.1f}G" if count >= _GIB else f"{count / _MIB:.0f}M"


@dataclass(frozen=True)
class Field:
    """A part of a status line, with its place in the order of importance."""

    text: str
    rank: int  # place in the order of importance; 0 is the most important
    style: str = ""  # parameters of the terminal's colour sequence (SGR), such as "32"; empty for none


def fit(fields: Sequence[Field], width: int, *, colour: bool = False, keeps: int = -1) -> str:
    """Join fields by two spaces; leave out the least important until they fit, and cut the last one that is left.

    Fields up to the rank ``keeps`` are neither left out nor cut.
    """
    kept = [field for field in fields if field.text]
    while len(kept) > 1 and _columns(kept) > width and max(field.rank for field in kept) > keeps:
        kept.remove(max(kept, key=lambda field: field.rank))
    if _columns(kept) > width and keeps < 0:
        return set_cell_size(kept[0].text, width).rstrip()
    return "  ".join(f"\x1b[{f.style}m{f.text}\x1b[0m" if colour and f.style else f.text for f in kept)


def _columns(fields: Sequence[Field]) -> int:
    return sum(cell_len(field.text) for field in fields) + 2 * max(0, len(fields) - 1)


def bar(share: float, width: int, stream: TextIO | None = None) -> str:
    """Return a bar of which a share is filled."""
    full, empty = ("━", "─") if writes_unicode(stream) else ("#", "-")
    filled = round(min(1.0, max(0.0, share)) * width)
    return full * filled + empty * (width - filled)


def has_colour() -> bool:
    """Return True unless the environment says NO_COLOR (https://no-color.org)."""
    return not os.environ.get("NO_COLOR")


_ERRORS = "error incident hang corruption checkpoint_failed snapshot_failed"
_WARNINGS = (
    "anomaly checkpoint_damaged checkpoint_prune_failed checkpoint_retry component_dropped corruption_explained "
    "evaluation_failed export_failed leader metrics_damaged off_forecast output_lost record_restored resized "
    "remote_failed rollback saver_lost slow_rank storage_slow tensorboard_dropped tracker_failed tracker_lost"
)
_LEVELS = {**dict.fromkeys(_ERRORS.split(), "error"), **dict.fromkeys(_WARNINGS.split(), "warning")}
_LONG = ("recipe", "stack")  # fields of events.jsonl that are left out: thousands of characters


def event_line(kind: str, fields: Mapping[str, Any], rank: int | None) -> str:
    """Return the log line of an event; ``rank`` reports it, or None for the supervisor."""
    rest = {name: value for name, value in fields.items() if name not in ("step", "message", *_LONG)}
    # Events of the supervisor name the rank that they are about.
    about = rest.get("rank") if rank is None else rank
    message = str(fields.get("message", fields.get("detail", kind.replace("_", " "))))
    level, values_ = _LEVELS.get(kind, "info"), to_json_value(rest)
    return json_line(kind, message, level=level, rank=about, step=fields.get("step"), values=values_)


_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Console:
    """Display of a run on rank 0: this one shows nothing, others lines, a line at the bottom of a terminal, or JSON."""

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        """Show a logged step."""

    def step(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        """Show that a step is done, logged or not; ``metrics`` are those known of every step."""

    def pause(self, name: str, *, share: float | None = None, seconds: float | None = None) -> None:
        """Show work between steps, "" at its end: the share that is done, or the seconds that it took before."""

    def message(self, text: str, values: Mapping[str, Any] = _NOTHING) -> None:
        """Show a line of text, or what it says as values, on a console for programs."""

    def warning(self, text: str) -> None:
        """Show a line that asks for attention, also where only such lines are shown."""
        self.message(f"warning: {text}")

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show an event, on a console for programs; people get messages."""

    def close(self) -> None:
        """Give the terminal back as it was; the stream stays open."""


class _LineConsole(Console):
    """Console of lines on a stream, flushed, so that ``tail -f`` and schedulers show each at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class JsonConsole(_LineConsole):
    """Console with one JSON object per line."""

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        found = {**metrics, "total_steps": total_steps, "eta_seconds": eta_seconds}
        text = f"{progress(metrics['step'], total_steps, eta_seconds)}  {values(metrics)}"
        self._print(json_line("step", text, rank=0, step=found.pop("step"), values=to_json_value(found)))

    def message(self, text: str, values: Mapping[str, Any] = _NOTHING) -> None:
        self._print(json_line("message", text, rank=0, values=to_json_value(values)))

    def warning(self, text: str) -> None:
        self._print(json_line("message", text, rank=0, level="warning"))

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._print(event_line(kind, fields, rank=0))


_QUIET_SECONDS = 30.0
"""Seconds without a line after which a console of lines says which step it is at."""


def prepare_streams(config: TrackingConfig) -> None:
    """Prepare the streams of ``hlat train`` for the recipe's console, before it prints anything else."""
    if config.console == "json":
        print_json_lines()


def console_kind(config: TrackingConfig, stream: TextIO) -> str:
    """Return the kind of console that the recipe asks for; the line of a terminal needs a terminal that draws it."""
    kind = config.console
    if kind in ("auto", "rich"):
        return "rich" if draws_lines(stream) else "plain"
    return kind


def shows_a_line(config: TrackingConfig) -> bool:
    """Return True if the recipe's console is a line at the bottom of the terminal of standard output."""
    return console_kind(config, sys.stdout) == "rich"


def shows_progress(config: TrackingConfig) -> bool:
    """Return True unless the recipe's console is for warnings only, or for nothing."""
    return config.console not in ("none", "warnings")


def make_console(config: TrackingConfig, stream: TextIO | None, *, total_steps: int, start_step: int) -> Console:
    """Return the recipe's console; ``auto`` and ``rich`` are the progress bar if the stream is a terminal."""
    stream = stream or sys.stdout
    kind = console_kind(config, stream)
    if kind == "rich":
        return ProgressBarConsole(stream, total_steps=total_steps, start_step=start_step)
    of_lines = {"warnings": WarningsConsole, "plain": PlainConsole, "json": JsonConsole}
    return of_lines[kind](stream) if kind in of_lines else Console()


class WarningsConsole(_LineConsole):
    """Console that shows warnings only, a line each."""

    def warning(self, text: str) -> None:
        self._print(escape_controls(f"warning: {text}"))


class PlainConsole(_LineConsole):
    """Console with one line per logged step."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock, self._said_at = clock, clock()

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        self.message(f"{progress(metrics['step'], total_steps, eta_seconds)}  {values(metrics)}")

    def step(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        self._say_if_quiet(f"{progress(metrics['step'], total_steps, eta_seconds)}  {values(metrics)}")

    def pause(self, name: str, *, share: float | None = None, seconds: float | None = None) -> None:
        if share is not None:
            self._say_if_quiet(f"{name} {share:.0%}")

    def _say_if_quiet(self, text: str) -> None:
        # A run whose steps are logged rarely must not look dead.
        if self._clock() - self._said_at >= _QUIET_SECONDS:
            self.message(text)

    def message(self, text: str, values: Mapping[str, Any] = _NOTHING) -> None:
        self._said_at = self._clock()
        self._print(escape_controls(text))


_RANKS = {"loss": 2, "tokens_per_second": 4, "mfu": 5, "grad_norm": 6, "lr": 8, "memory_bytes": 9}
"""Places of metrics in the order of importance."""
_STEP, _ETA, _PAUSE, _KEPT, _SHARE, _BAR, _OTHERS = 0, 1, 2, 3, 5, 7, 7
_BAR_COLUMNS = 8
_GREEN = "32"
LEAST_SHARE = 0.05  # of work done, below which its time left is not estimated


def time_left(share: float, seconds: float) -> float | None:
    """Seconds left of work of which a share took some seconds; None while too little is done to tell."""
    return seconds * (1.0 - share) / share if share >= LEAST_SHARE else None


class _Pause:
    """Work between steps that is shown: its name, when it began, and how far it is."""

    def __init__(self, name: str, begin: float, expected: float | None) -> None:
        self.name, self._begin, self._expected = name, begin, expected
        self.share: float | None = None  # None if it does not report how far it is

    def left(self, now: float) -> float | None:
        if self.share is not None:
            return time_left(self.share, now - self._begin)
        return None if self._expected is None else max(0.0, self._expected - (now - self._begin))

    def text(self, now: float) -> str:
        return f"{self.name} {now - self._begin:.0f} s" if self.share is None else f"{self.name} {self.share:.0%}"


class ProgressBarConsole(Console):
    """Line at the bottom of a terminal with step, time left and the last values; logged steps scroll above it."""

    def __init__(
        self, stream: TextIO, *, total_steps: int, start_step: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._clock = stream, clock
        self._step, self._total = start_step, total_steps
        self._ends_at: float | None = None  # estimated, on the clock
        self._metrics: dict[str, Any] = {}
        # Until the first step is done there is no pace: the line shows what is being waited for.
        self._pause: _Pause | None = _Pause("first step", clock(), None)
        self._observing = ExitStack()
        self._observing.enter_context(observe_stages(lambda name: self.pause(name) if name else None))
        line = open_line()
        if line is None:
            line = BottomLine(stream, self.render)
        else:
            line.show(self.render)  # the line of the start goes on as that of the run
        self._line = line

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        # Each logged step stays, so that the terminal still has the history of a run that was killed. Losses of
        # validations and scores of tasks are never left out.
        fields = [Field(f"step {metrics['step']}/{total_steps}", _STEP), *_value_fields(metrics, _KEPT)]
        self.message(fit(fields, columns(self._stream), keeps=_KEPT))
        self._metrics = {}
        self.step(metrics, total_steps, eta_seconds)

    def step(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        self._step, self._total, self._pause = metrics["step"], total_steps, None
        self._ends_at = None if eta_seconds is None else self._clock() + eta_seconds
        self._metrics |= metrics

    def pause(self, name: str, *, share: float | None = None, seconds: float | None = None) -> None:
        if self._pause is None or self._pause.name != name:
            self._pause = _Pause(name, self._clock(), seconds) if name else None
        if self._pause is not None:
            self._pause.share = share

    def render(self, width: int) -> str:
        now, share, pause = self._clock(), self._step / self._total, self._pause
        left = None if self._ends_at is None else max(0.0, self._ends_at - now)
        if pause is not None and not left:
            left = pause.left(now)  # its first time, which the time left of the run does not have
        fields = [
            Field(bar(share, _BAR_COLUMNS, self._stream), _BAR, _GREEN),
            Field(f"{spinner(self._stream)} step {self._step}/{self._total}", _STEP),
            Field(f"{share:.1%}", _SHARE),
            Field(pause.text(now) if pause is not None else "", _PAUSE),
            Field("" if pause and left is None else f"eta {'-' if left is None else duration(left)}", _ETA),
            *_value_fields(self._metrics, _OTHERS),
        ]
        return fit(fields, width, colour=has_colour())

    def message(self, text: str, values: Mapping[str, Any] = _NOTHING) -> None:
        self._line.print(text)

    def close(self) -> None:
        self._observing.close()
        self._line.close()


def _value_fields(metrics: Metrics, others: int) -> list[Field]:
    return [Field(text, _RANKS.get(name, others)) for name, text in named_values(metrics)]
