"""Arguments and displays that several verbs share, and when Ctrl-C begins to interrupt work."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hlat.runtime import show_beneath_rich, visible
from hlat.runtime.backend import untested_torch
from hlat.runtime.process import LAUNCHER

if TYPE_CHECKING:
    from hlat.data.prepare import Progress

RecipeArgument = Annotated[
    str, typer.Argument(help="Recipe file, or the name of a shipped recipe.", show_default=False)
]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(help="Overrides, as in training.steps=100 data.path=corpus.txt")
]
CheckpointArgument = Annotated[
    str, typer.Argument(help="Run folder, its checkpoints folder, or one checkpoint.", show_default=False)
]


_SECONDS_BETWEEN_LINES = 5.0


def ready() -> None:
    """Ctrl-C interrupts a verb's work from here on; until a verb calls this, nothing has been started.

    A release of PyTorch that hlat was not tested with is named.

    A verb imports its room when it runs and not before, so that each starts as fast as it can: torch takes a second,
    its distributed parts two more.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background job does not hear Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # What hlat starts itself is silent, and of the processes that others start, all but the first.
    if LAUNCHER not in os.environ and os.environ.get("RANK", "0") == "0" and (line := untested_torch()):
        typer.echo(line, err=True)


def say(text: str = "") -> None:
    """One line, or several, to standard output: everything that verbs print goes through here.

    Control characters are shown (``runtime.visible``). A reader that has gone away (``| head``) must not end the work.
    """
    try:
        typer.echo(visible(text))
    except BrokenPipeError:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  (for the rest of the process)


def complain(message: str) -> None:
    """A message to standard error, after what was said before it."""
    with suppress(BrokenPipeError):
        sys.stdout.flush()
        typer.echo(visible(message), err=True)


@contextmanager
def data_progress() -> Iterator["Progress"]:
    """Shows how far the preparation of text is: a bar on a terminal, a line every few seconds otherwise."""
    if sys.stdout.isatty():
        with _bar() as bar:
            yield bar
        return
    said_at = time.monotonic()

    def line(stage: str, done: int, total: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= _SECONDS_BETWEEN_LINES:
            said_at = time.monotonic()
            say(f"prepare: {stage} {done / max(1, total):.0%}, {done / 1e6:,.1f} of {total / 1e6:,.1f} MB")

    yield line


@contextmanager
def _bar() -> Iterator["Progress"]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # The stream is named, since sys.stdout is another one while the bar is drawn.
    with Progress(*columns, TimeRemainingColumn(), console=Console(file=sys.stdout), transient=True) as bar:
        show_beneath_rich()
        task = bar.add_task("prepare", total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)
