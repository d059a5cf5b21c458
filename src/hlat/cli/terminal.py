"""Shared parts of all verbs: their common arguments, the start of handling Ctrl-C, and everything that is printed.

verb -> opening_line (a line on the terminal, before anything slow is imported)
-> ready (from here on Ctrl-C interrupts) -> its room, imported now -> data_progress
-> say, complain, show_notes, show_event: standard output and error, or JSON lines
"""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from hlat.runtime.backend.torch_private import untested_torch_warning
from hlat.runtime.logs import json_line, prints_json
from hlat.runtime.process import LAUNCHER_ENV, end_at_sigterm, let_output_be_lost, raise_interrupts
from hlat.runtime.terminal import (
    BottomLine,
    StageLine,
    columns,
    draws_lines,
    erase_rest_of,
    escape_controls,
    in_columns,
)

if TYPE_CHECKING:
    from hlat.config import SettingNote
    from hlat.data import ProgressCallback


RecipeArgument = Annotated[
    str, typer.Argument(help="Recipe file, or the name of a shipped recipe.", show_default=False)
]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(help="Overrides, as in training.steps=100 data.path=corpus.txt")
]
CheckpointArgument = Annotated[
    str, typer.Argument(help="Run folder, its checkpoints folder, or one checkpoint.", show_default=False)
]
WeightsOption = Annotated[
    Literal["model", "ema"], typer.Option(help="The weights, or their average (of a run with training.ema).")
]

LOG_ENV = "HLAT_LOG"
"""Environment variable that asks for JSON lines: json, or text."""

QuietOption = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print warnings and the end only, no progress."),
]
AllOption = Annotated[bool, typer.Option("--verbose", "-v", help="List everything, not only the first of many.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Say what was measured and decided, too.")]


def whole_number(least: int) -> Callable[[str | int], int]:
    """Return a parser of options that takes numbers from ``least`` on as recipes do: 2000, 2K, 1Ki, 1e3."""

    def number(text: str | int) -> int:
        from hlat.runtime.quantities import QuantityError, parse_whole

        try:
            found = parse_whole(text) if isinstance(text, str) else text
        except QuantityError as error:
            raise typer.BadParameter(str(error)) from None
        if found is None or found < least:
            raise typer.BadParameter(f"{text} is no whole number of at least {least}, as in 2000 or 2K")
        return found

    return number


def count(help: str, least: int = 1) -> Any:
    """Make the option of a whole number, of at least ``least``."""
    return typer.Option(parser=whole_number(least), metavar="N", help=help)


def ready(*, hears_sigterm: bool = False, works: bool = False) -> None:
    """Let Ctrl-C interrupt from here on, and warn of a release of PyTorch that hlat was not tested with.

    A verb calls this before it starts anything. It imports its room only when it runs, so that each verb starts as fast
    as it can: torch takes a second, its distributed parts two more.
    """
    if works:
        # The verb is there for its work, not for what it prints: it goes on if nobody reads that or the disk is full.
        let_output_be_lost()
    raise_interrupts()
    if not hears_sigterm:
        # Without a message. Verbs that train have a handler of their own, which saves.
        end_at_sigterm()
    logger = logging.getLogger("hlat")
    if logging.lastResort is not None and logging.lastResort not in logger.handlers:
        logger.addHandler(logging.lastResort)  # warnings go to standard error; as a library hlat is quiet
    # Only one process warns: not those that hlat starts itself, and of others only rank 0.
    if LAUNCHER_ENV not in os.environ and os.environ.get("RANK", "0") == "0" and (line := untested_torch_warning()):
        typer.echo(line, err=True)


def say(text: str = "", level: str = "info", *, exact: bool = False) -> None:
    """Print text to standard output, control characters as escapes: everything that verbs print goes through here."""
    # Several lines are a file or script, which stays as it is, as does a command: people copy them.
    shown = escape_controls(text) if exact or "\n" in text else _readable(text, sys.stdout)
    typer.echo(json_line("message", text, level=level) if prints_json() else shown)


def complain(message: str, level: str = "warning") -> None:
    """Print a message to standard error; ``level`` (warning, error) is that of a JSON line."""
    # First what was printed before, so that both streams read in order.
    sys.stdout.flush()
    typer.echo(
        json_line("message", message, level=level) if prints_json() else _readable(message, sys.stderr), err=True
    )


def _readable(message: str, stream: TextIO) -> str:
    """Escape control characters; break long lines between words on a terminal, not in files, which programs read."""
    text = escape_controls(message)
    return in_columns(text, columns(stream)).rstrip("\n") if text and stream.isatty() else text


def show_notes(notes: "Iterable[SettingNote]") -> None:
    """Print notes and warnings about settings, a line each."""
    for note in notes:
        say(f"{note.kind}: {note}", "warning" if note.kind == "warning" else "info")


def say_above(text: str) -> None:
    """Print text where another process may be drawing a line on the same terminal."""
    erase_rest_of(sys.stdout)
    say(text)


def complain_above(message: str) -> None:
    """Print a message where another process may be drawing a line on the same terminal."""
    erase_rest_of(sys.stderr)
    complain(message)


def show_event(kind: str, fields: Mapping[str, Any]) -> None:
    """Print an event of the supervisor where output is JSON lines."""
    from hlat.tracking import event_line

    if prints_json():
        typer.echo(event_line(kind, fields, rank=None))


@contextmanager
def data_progress() -> Iterator["ProgressCallback"]:
    """Show the progress of data preparation: a bar on a terminal, a line every few seconds otherwise."""
    from hlat.tracking import show_data_progress

    with show_data_progress(sys.stdout, say) as progress:
        yield progress


class OpeningLine:
    """Line on a terminal about what a command is doing, while nothing else shows it; elsewhere it does nothing."""

    def __init__(self, *, draws: bool = True) -> None:
        # Ranks of torchrun share the terminal: one of them draws.
        self._draws = draws and draws_lines(sys.stdout) and os.environ.get("RANK", "0") == "0"
        self._line: BottomLine | None = None
        self._was_left = False

    def show(self, what: str) -> Callable[[], None]:
        """Show what is being done; return the function that leaves the line to another process."""
        if self._draws:
            if self._line is None:
                self._line = BottomLine(sys.stdout, StageLine(what))
            else:
                self._line.show(StageLine(what))
        return self.leave

    def leave(self) -> None:
        if self._line is not None:
            # Nothing is erased: another process draws its line there.
            self._line.close(leave=True)
            self._line, self._was_left = None, True

    def end(self) -> None:
        self._draws = False
        if self._line is not None:
            self._line.close()
            self._line = None
        elif self._was_left:
            erase_rest_of(sys.stdout)


@contextmanager
def opening_line(what: str, *, draws: bool = True) -> Iterator[OpeningLine]:
    """Show on a terminal, within the block, that a command has begun, before anything slow is imported."""
    line = OpeningLine(draws=draws)
    # For a process that a supervisor has started, the supervisor shows the line.
    if LAUNCHER_ENV not in os.environ:
        line.show(what)
    try:
        yield line
    finally:
        line.end()
