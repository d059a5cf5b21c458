"""Arguments and displays that several verbs share."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

from hlat.data import Progress

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


def say(text: str = "") -> None:
    """One line to standard output. A reader that has gone away (``| head``) must not end the work."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  (for the rest of the process)


@contextmanager
def data_progress() -> Iterator[Progress]:
    """Shows how far the preparation of text is: a bar on a terminal, a line every few seconds otherwise."""
    if sys.stdout.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with RichProgress(*columns, TimeRemainingColumn(), console=Console(), transient=True) as bar:
            task = bar.add_task("prepare", total=None)
            yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)
        return
    said_at = time.monotonic()

    def line(stage: str, done: int, total: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= _SECONDS_BETWEEN_LINES:
            said_at = time.monotonic()
            say(f"prepare: {stage} {done / max(1, total):.0%}, {done / 1e6:,.1f} of {total / 1e6:,.1f} MB")

    yield line
