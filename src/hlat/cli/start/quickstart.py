"""``hlat quickstart``: from nothing to a trained, evaluated, exported model."""

from pathlib import Path
from typing import Annotated

import typer

from hlat.cli.common import data_progress, ready, say, whole_number


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
) -> None:
    """Train a small model on this machine: no account, no GPU, no download."""
    from hlat.quickstart import run_quickstart

    ready()
    run_quickstart(to, say, data_progress, steps)
