"""Asynchronous saving: a staging buffer in shared memory, and a saver process that writes it during training."""

from hlat.checkpoint.background.async_saver import AsyncSaver, SaveOutcome, SaverReport, SlowStorage
from hlat.checkpoint.background.saver_process import run_saver

__all__ = [
    "AsyncSaver",
    "SaveOutcome",
    "SaverReport",
    "SlowStorage",
    "run_saver",
]
