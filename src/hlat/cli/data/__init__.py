"""Verbs about text and prepared data: ``hlat data``."""
