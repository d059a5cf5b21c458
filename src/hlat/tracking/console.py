"""Console output of a run, for terminals and log files.

metrics, eta -> one line per logged step           (plain: files, pipes, schedulers)
             -> one progress bar with the same values, a line per validation   (rich: terminals)
             -> one JSON object per step, message and event   (json: log collectors)
"""

import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from rich.console import Console as RichTerminal
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from hlat.config.sections import TrackingConfig
from hlat.runtime import escape_beneath_rich, escape_controls
from hlat.runtime.process import print_json_lines
from hlat.tracking.json_console import JsonConsole
from hlat.tracking.metrics import Metrics
from hlat.tracking.metrics_text import progress, values


class Console(Protocol):
    """Display of a run."""

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        """Show a logged step."""

    def message(self, text: str) -> None:
        """Show a line of text."""

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show an event, on a console for programs; people get messages."""

    def close(self) -> None:
        """Restore the terminal."""


def prepare_streams(config: TrackingConfig) -> None:
    """Prepare the streams of the command ``hlat train`` for the recipe's console, before it prints anything else."""
    if config.console == "json":
        print_json_lines()


def make_console(config: TrackingConfig, stream: TextIO | None, *, total_steps: int, start_step: int) -> Console:
    """Return the recipe's console; ``auto`` is the progress bar if the stream is a terminal that can draw it."""
    stream = stream or sys.stdout
    kind = config.console
    if kind == "auto":
        kind = "rich" if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown") else "plain"
    if kind == "none":
        return SilentConsole()
    if kind == "plain":
        return PlainConsole(stream)
    if kind == "json":
        return JsonConsole(stream)
    return ProgressBarConsole(RichTerminal(file=stream), total_steps=total_steps, start_step=start_step)


class SilentConsole:
    """Console that shows nothing."""

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        """Show nothing."""

    def message(self, text: str) -> None:
        """Show nothing."""

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show nothing: people get messages."""

    def close(self) -> None:
        """Do nothing."""


class PlainConsole:
    """Console with one line per logged step, flushed, so that ``tail -f`` and schedulers show it at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        """Print the line of a logged step."""
        self.message(f"{progress(metrics['step'], total_steps, eta_seconds)}  {values(metrics)}")

    def message(self, text: str) -> None:
        """Print a line of text."""
        self._stream.write(escape_controls(text) + "\n")
        self._stream.flush()

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show nothing: people get messages."""

    def close(self) -> None:
        """Do nothing: the stream stays open."""


class ProgressBarConsole:
    """Progress bar with the values of the last logged step; validations and messages are printed above it."""

    def __init__(self, terminal: RichTerminal, *, total_steps: int, start_step: int) -> None:
        self._progress = Progress(
            BarColumn(bar_width=8),
            TextColumn("{task.fields[line]}", markup=False),
            console=terminal,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=start_step, line="")
        self._progress.start()
        escape_beneath_rich()

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        """Update the bar; print a line above it if the step validated."""
        step = metrics["step"]
        line = f"{progress(step, total_steps, eta_seconds)}  {values(metrics)}"
        if "val_loss" in metrics:
            self.message(f"step {step}/{total_steps}  {values(metrics)}")
        self._progress.update(self._task, completed=step, line=line, refresh=True)

    def message(self, text: str) -> None:
        """Print a line of text above the bar."""
        self._progress.console.print(Text(escape_controls(text)), soft_wrap=True)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show nothing: people get messages."""

    def close(self) -> None:
        """Draw the bar a last time, and restore the terminal."""
        self._progress.refresh()
        self._progress.stop()
