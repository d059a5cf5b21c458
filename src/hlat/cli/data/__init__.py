"""Verbs about text and prepared data: ``hlat data``."""

from hlat.cli.data.prepare import app as data_app

__all__ = ["data_app"]
