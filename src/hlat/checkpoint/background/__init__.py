"""Saving while training goes on: a copy in shared memory and the process that writes it."""

from hlat.checkpoint.background.async_saver import BackgroundSaver, Note, Settled
from hlat.checkpoint.background.saver_process import run_saver

__all__ = ["BackgroundSaver", "Note", "Settled", "run_saver"]
