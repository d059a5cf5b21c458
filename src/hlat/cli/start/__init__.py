"""Verbs to begin with: ``hlat quickstart`` and ``hlat init``."""

import typer

from hlat.cli.start import init, quickstart


def register(app: typer.Typer) -> None:
    """Add the verbs of this folder."""
    quickstart.register(app)
    init.register(app)
