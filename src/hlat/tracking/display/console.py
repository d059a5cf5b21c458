"""Console output of a run, for terminals and log files.

metrics, eta -> one line per logged step           (plain: files, pipes, schedulers)
             -> one line at the bottom with the same values, a line per validation   (rich: terminals)
             -> one JSON object per step, message and event   (json: log collectors)
"""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol, TextIO

from hlat.config import TrackingConfig
from hlat.runtime.bottom_line import BottomLine, draws_lines, open_line
from hlat.runtime.process.json_output import print_json_lines
from hlat.runtime.process.startup_stage import observe_stages
from hlat.runtime.stage_line import spinner
from hlat.runtime.terminal_text import escape_controls
from hlat.tracking.display.status_line import Field, bar, fit, has_colour
from hlat.tracking.json_console import JsonConsole
from hlat.tracking.metrics import Metrics
from hlat.tracking.metrics_text import duration, named_values, progress, values

_QUIET_SECONDS = 30.0
"""Seconds without a line after which a console of lines says which step it is at."""


class Console(Protocol):
    """Display of a run."""

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        """Show a logged step."""

    def step(self, step: int, total_steps: int, eta_seconds: float | None) -> None:
        """Show that a step is done, logged or not."""

    def message(self, text: str) -> None:
        """Show a line of text."""

    def warning(self, text: str) -> None:
        """Show a warning."""

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show an event, on a console for programs; people get messages."""

    def close(self) -> None:
        """Restore the terminal."""


def prepare_streams(config: TrackingConfig) -> None:
    """Prepare the streams of the command ``hlat train`` for the recipe's console, before it prints anything else."""
    if config.console == "json":
        print_json_lines()


def console_kind(config: TrackingConfig, stream: TextIO) -> str:
    """Return the kind of console that the recipe asks for; the line of a terminal needs a terminal that draws it."""
    kind = config.console
    if kind in ("auto", "rich"):
        return "rich" if stream.isatty() and draws_lines() else "plain"
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
    if kind == "none":
        return SilentConsole()
    if kind == "warnings":
        return WarningsConsole(stream)
    if kind == "plain":
        return PlainConsole(stream)
    if kind == "json":
        return JsonConsole(stream)
    return ProgressBarConsole(stream, total_steps=total_steps, start_step=start_step)


class SilentConsole:
    """Console that shows nothing."""

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        """Show nothing."""

    def step(self, step: int, total_steps: int, eta_seconds: float | None) -> None:
        """Show nothing."""

    def message(self, text: str) -> None:
        """Show nothing."""

    def warning(self, text: str) -> None:
        """Show nothing."""

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show nothing: people get messages."""

    def close(self) -> None:
        """Do nothing."""


class WarningsConsole(SilentConsole):
    """Console that shows warnings only.

    Args:
        stream: receives them, a line each.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def warning(self, text: str) -> None:
        """Print a warning."""
        self._stream.write(escape_controls(f"warning: {text}") + "\n")
        self._stream.flush()


class PlainConsole:
    """Console with one line per logged step, flushed, so that ``tail -f`` and schedulers show it at once.

    Args:
        stream: receives the lines.
        clock: seconds, monotonic.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock, self._said_at = stream, clock, clock()

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        """Print the line of a logged step."""
        self.message(f"{progress(metrics['step'], total_steps, eta_seconds)}  {values(metrics)}")

    def step(self, step: int, total_steps: int, eta_seconds: float | None) -> None:
        """Print which step it is, if nothing was printed for a while."""
        if self._clock() - self._said_at >= _QUIET_SECONDS:
            self.message(progress(step, total_steps, eta_seconds))

    def message(self, text: str) -> None:
        """Print a line of text."""
        self._said_at = self._clock()
        self._stream.write(escape_controls(text) + "\n")
        self._stream.flush()

    def warning(self, text: str) -> None:
        """Print a warning."""
        self.message(f"warning: {text}")

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show nothing: people get messages."""

    def close(self) -> None:
        """Do nothing: the stream stays open."""


_RANKS = {"loss": 2, "tokens_per_second": 3, "mfu": 4, "grad_norm": 6, "lr": 8, "memory_bytes": 9}
"""Places of metrics in the order of importance; others, such as scores of tasks, come before the last two."""
_STEP, _ETA, _SHARE, _BAR, _OTHERS = 0, 1, 5, 7, 7
_BAR_COLUMNS = 8
_GREEN = "32"


class ProgressBarConsole:
    """Line at the bottom of a terminal with step, time left and the last logged values; messages scroll above it.

    Args:
        stream: the terminal.
        total_steps: steps of the run.
        start_step: steps done so far.
        clock: seconds, monotonic.
    """

    def __init__(
        self, stream: TextIO, *, total_steps: int, start_step: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._clock, self._begin = stream, clock, clock()
        self._step, self._total = start_step, total_steps
        self._eta: float | None = None
        self._started = False
        self._metrics: Metrics = {}
        self._last_line = ""
        self._stage, self._observing = "first step", ExitStack()
        self._observing.enter_context(observe_stages(self._enter_stage))
        line = open_line()
        if line is None:
            line = BottomLine(stream, self.render)
        else:
            line.show(self.render)  # that of the start goes on as that of the run
        self._line = line

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        """Show the values of a logged step; print a line above if the step validated."""
        step = metrics["step"]
        text, self._last_line = f"step {step}/{total_steps}  {values(metrics)}", ""
        if any(key.startswith(("val", "task/")) for key in metrics):
            self.message(text)
        else:
            self._last_line = text
        self._metrics = metrics
        self.step(step, total_steps, eta_seconds)

    def step(self, step: int, total_steps: int, eta_seconds: float | None) -> None:
        """Show that a step is done."""
        self._step, self._total, self._eta, self._started = step, total_steps, eta_seconds, True

    def render(self, width: int) -> str:
        """Return the line for a width in columns."""
        share = self._step / self._total
        fields = [
            Field(bar(share, _BAR_COLUMNS, self._stream), _BAR, _GREEN),
            Field(f"{spinner(self._stream)} step {self._step}/{self._total}", _STEP),
            Field(f"{share:.1%}", _SHARE),
        ]
        if self._started:
            eta = "-" if self._eta is None else duration(self._eta)
            fields.append(Field(f"eta {eta}", _ETA))
        else:
            fields.append(Field(f"{self._stage} {self._clock() - self._begin:.0f} s", _ETA))
        fields += [Field(text, _RANKS.get(name, _OTHERS)) for name, text in named_values(self._metrics)]
        return fit(fields, width, colour=has_colour())

    def message(self, text: str) -> None:
        """Print a line of text above the line."""
        self._line.print(text)

    def warning(self, text: str) -> None:
        """Print a warning above the line."""
        self.message(f"warning: {text}")

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show nothing: people get messages."""

    def close(self) -> None:
        """Print the values of the last logged step, unless they have been, and erase the line."""
        if self._last_line:
            self.message(self._last_line)
            self._last_line = ""
        self._observing.close()
        self._line.close()

    def _enter_stage(self, name: str) -> None:
        if name:
            self._stage, self._begin = name, self._clock()
