"""Quickstart: the complete workflow on one machine, from text to a model in a Hugging Face folder."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.quickstart.story import run_quickstart as run_quickstart

__getattr__ = lazily(
    __name__,
    {
        "story": "run_quickstart",
    },
)
