"""The table of checks of a start. To add one, write a function of a ``StartPlace`` and add its line."""

from collections.abc import Callable, Iterator

from hlat.config import Problem, SettingNote
from hlat.launch.start_checks import files, machine, odd
from hlat.launch.start_checks.place import StartPlace

StartCheck = Callable[[StartPlace], Iterator[Problem | SettingNote]]
"""Yields problems, which stop a run, and notes, which do not."""

CHECKS: tuple[StartCheck, ...] = (
    files.written_folders,
    machine.device,
    machine.precision,
    machine.schedule,
    files.inputs,
    files.length,
    files.weights,
    files.tasks,
    machine.memory,
    machine.disk,
    odd.short_text,
    odd.passes,
    odd.validation,
    odd.tokenizer,
    odd.files,
    odd.cores,
)
"""All checks. What is odd in a recipe alone, wherever it runs, is in the table of ``hlat.config.rules.notes``."""
