"""Verbs about text and prepared data: ``hlat data``."""

from hlat.cli.data.prepare import app

__all__ = ["app"]
