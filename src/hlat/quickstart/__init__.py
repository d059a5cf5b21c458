"""The whole story on one machine: text to model to Hugging Face folder, with nothing but this package."""

from hlat.quickstart.story import Result, run_quickstart

__all__ = ["Result", "run_quickstart"]
