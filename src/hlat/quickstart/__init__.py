"""Quickstart: the complete workflow on one machine, from text to a model in a Hugging Face folder."""

from hlat.quickstart.story import run_quickstart

__all__ = ["run_quickstart"]
