"""Console output of a run, for terminals and log files.

metrics, eta -> one line per logged step           (plain: files, pipes, schedulers)
             -> one progress bar with the same values, a line per validation   (rich: terminals)
"""

import math
import os
import sys
from collections.abc import Callable
from typing import Protocol, TextIO

from rich.console import Console as RichTerminal
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from hlat.config.sections import TrackingConfig
from hlat.runtime import escape_beneath_rich, escape_controls
from hlat.tracking.metrics import Metrics

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_GIB, _MIB = 1 << 30, 1 << 20


class Console(Protocol):
    """Display of a run."""

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        """Show a logged step."""

    def message(self, text: str) -> None:
        """Show a line of text."""

    def close(self) -> None:
        """Restore the terminal."""


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
    return ProgressBarConsole(RichTerminal(file=stream), total_steps=total_steps, start_step=start_step)


class SilentConsole:
    """Console that shows nothing."""

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        """Show nothing."""

    def message(self, text: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Do nothing."""


class PlainConsole:
    """Console with one line per logged step, flushed, so that ``tail -f`` and schedulers show it at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def log(self, metrics: Metrics, total_steps: int, eta_seconds: float | None) -> None:
        """Print the line of a logged step."""
        self.message(f"{_progress(metrics['step'], total_steps, eta_seconds)}  {values(metrics)}")

    def message(self, text: str) -> None:
        """Print a line of text."""
        self._stream.write(escape_controls(text) + "\n")
        self._stream.flush()

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
        line = f"{_progress(step, total_steps, eta_seconds)}  {values(metrics)}"
        if "val_loss" in metrics:
            self.message(f"step {step}/{total_steps}  {values(metrics)}")
        self._progress.update(self._task, completed=step, line=line, refresh=True)

    def message(self, text: str) -> None:
        """Print a line of text above the bar."""
        self._progress.console.print(Text(escape_controls(text)), soft_wrap=True)

    def close(self) -> None:
        """Draw the bar a last time, and restore the terminal."""
        self._progress.refresh()
        self._progress.stop()


def _progress(step: int, total_steps: int, eta_seconds: float | None) -> str:
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
    fields = [f"loss {metrics['loss']:.4f}"] if "loss" in metrics else []
    if "val_loss" in metrics:
        bits = f" (bpb {metrics['val_bits_per_byte']:.4f})" if "val_bits_per_byte" in metrics else ""
        fields.append(f"val {metrics['val_loss']:.4f}{bits}")
    for key, value in metrics.items():
        if key.startswith("val/") and key.endswith("/loss"):
            fields.append(f"val {key.split('/')[1]} {value:.4f}")
        elif key.startswith("task/") and key.endswith("/acc"):
            fields.append(f"{key.split('/')[1]} {value:.1%}")
    fields += [form(metrics[key]) for key, form in _FORMATS.items() if key in metrics]
    return "  ".join(fields)


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
