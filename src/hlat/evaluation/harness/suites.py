"""Suites: tasks with their settings, columns of a table, and published results beside them, from a YAML file each.

    NAME or FILE --load_suite--> Suite        --tasks a,b--> Suite with a column per task

A suite is added by writing a file; nothing else lists suites.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hlat.runtime.errors import DataError

_FOLDER = Path(__file__).with_name("suites")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskEntry(_Part):
    """A task of lm-eval in a suite."""

    task: str
    """Name of a task or a group of tasks."""
    shots: int | None = Field(None, ge=0)
    """Solved examples in front of each question; null for the task's default."""
    metric: str = "acc"
    """Metric that counts, as "exact_match,strict-match": with the filter, if there are several."""
    files: dict[str, str] = {}
    """Data files by split, in the folder of data files; empty: the task's own data set, which is downloaded."""
    field: str | None = None
    """Key of the list of examples in such a file; null if a line is an example."""
    settings: dict[str, Any] = {}
    """Fields of the task's configuration to be replaced."""


class Column(_Part):
    """A column of the table: the mean of one metric over some tasks."""

    name: str
    """Heading."""
    tasks: tuple[TaskEntry, ...]
    """Its tasks."""
    averaged: bool = True
    """True if the tasks count in the average over all tasks."""
    lower_is_better: bool = False
    """True for a measure of bias."""


class Published(_Part):
    """Published results beside the suite's columns."""

    source: str
    """Publication."""
    rows: dict[str, dict[str, float]]
    """Values in percent, by model and column."""
    note: str = ""
    """What readers of the table should know."""


class Suite(_Part):
    """Tasks to run together."""

    name: str
    """Name."""
    title: str
    """Title of the table."""
    folders: tuple[str, ...] = ()
    """Folders of lm-eval's tasks that it needs; none for all, whose 14,000 files take 20 seconds to read."""
    columns: tuple[Column, ...]
    """Columns, in order."""
    average: str | None = "Average"
    """Heading of the mean over all averaged tasks; null for none."""
    published: Published | None = None
    """Published results."""

    @property
    def entries(self) -> list[TaskEntry]:
        """All tasks, in order."""
        return [entry for column in self.columns for entry in column.tasks]

    @property
    def needs_files(self) -> bool:
        """True if a task reads data files from a folder that has to be named."""
        return any(entry.files for entry in self.entries)


def suite_names() -> list[str]:
    """Names of the suites that ship with hlat."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def load_suite(name: str) -> Suite:
    """Load a suite.

    Args:
        name: name of a suite that ships with hlat, or a YAML file.

    Raises:
        DataError: there is no such suite, or the file has mistakes; lists all of them.
    """
    file = Path(name) if name.endswith((".yaml", ".yml")) else _FOLDER / f"{name}.yaml"
    if not file.is_file() or (file.parent == _FOLDER and file.stem not in suite_names()):
        raise DataError(f"{name}: no such suite. Name one of {', '.join(suite_names())}, or a YAML file.")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        suite = Suite.model_validate(content)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{file}: not a suite: {_reason(error)}") from error
    names = [entry.task for entry in suite.entries]
    if twice := sorted({each for each in names if names.count(each) > 1}):
        raise DataError(f"{file}: tasks are listed twice: {', '.join(twice)}. A variant needs a name of its own.")
    return suite


def suite_of_tasks(tasks: Sequence[str], shots: int | None = None) -> Suite:
    """Make a suite of some tasks, with a column for each and their default settings."""
    columns = [Column(name=task, tasks=(TaskEntry(task=task, shots=shots, metric=""),)) for task in tasks]
    return Suite(name="tasks", title="Tasks", columns=tuple(columns), average=None)


def _reason(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return "\n  ".join(["", *problems])
