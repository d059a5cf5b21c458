"""Saving while training goes on: a copy in shared memory and the process that writes it."""

from hlat.checkpoint.background.async_saver import AsyncSaver, SaveOutcome, SaverReport
from hlat.checkpoint.background.saver_process import run_saver

__all__ = [
    "AsyncSaver",
    "SaveOutcome",
    "SaverReport",
    "run_saver",
]
