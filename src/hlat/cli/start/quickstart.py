"""``hlat quickstart``: from nothing to a trained, evaluated, exported model."""

from pathlib import Path
from typing import Annotated

import typer

from hlat.cli.common import VerboseOption, data_progress, opening_line, ready, say, whole_number
from hlat.runtime.process.verbosity import be_verbose


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(quickstart)


def quickstart(
    to: Annotated[Path, typer.Option(help="Folder for everything that it writes.")] = Path("quickstart"),
    steps: Annotated[
        int | None,
        typer.Option(
            parser=whole_number(2), metavar="N", help="Number of training steps; default: about two minutes of them."
        ),
    ] = None,
    verbose: VerboseOption = False,
) -> None:
    """Train a small model on this machine: no account, no GPU, no download."""
    if verbose:
        be_verbose()
    with opening_line("importing PyTorch"):
        from hlat.quickstart import run_quickstart
    ready(works=True)
    run_quickstart(to, say, data_progress, steps)
