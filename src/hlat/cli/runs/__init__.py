"""Verbs that look at runs: ``hlat report``, ``runs``, ``show`` and ``compare``."""

import typer

from hlat.cli.runs import report, show


def register(app: typer.Typer) -> None:
    """Add the verbs of this folder."""
    report.register(app)
    show.register(app)
