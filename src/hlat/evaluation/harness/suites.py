"""Suites of tasks, the report of a suite on a model, and its tables.

    NAME or FILE --load_suite--> Suite: tasks with their settings, columns, published results
    --tasks a,b --suite_of_tasks--> Suite with a column per task
    results of lm-eval --column_values--> columns in percent, average --SuiteReport--> results.json
    Suite, SuiteReport --> the model's columns beside published ones, as Markdown and as an HTML page

A suite is added by writing a YAML file; nothing else lists suites.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hlat.page import page, paragraph, table
from hlat.runtime.errors import DataError
from hlat.runtime.terminal import escape_controls

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
    """Data files by split, in the folder of data files; empty: the task's own data set, copied there or downloaded."""
    field: str | None = None
    """Key of the list of examples in such a file; null if a line is an example."""
    license: str = ""
    """Licence of the data, named where they are missing."""
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
        return [entry for column in self.columns for entry in column.tasks]


def suite_names() -> list[str]:
    """List the suites that ship with hlat, sorted."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def load_suite(name: str) -> Suite:
    """Load a suite by its name or YAML file; raises DataError with all mistakes of the file."""
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


RESULTS = "results.json"


@dataclass(frozen=True)
class SuiteReport:
    """Results of a suite on one model, as in results.json."""

    suite: str
    model: Mapping[str, Any]  # path, sha256, dtype and number of parameters of the model
    harness: Mapping[str, Any]  # name and version of the program that defines the tasks, and its seeds
    settings: Mapping[str, Any]  # what else decides about the results: limit, maximum lengths
    tasks: Mapping[str, Mapping[str, Any]]  # for each task its version, shots, samples and metrics
    columns: Mapping[str, float]  # values in percent, by column; a column in which a task has no value is missing
    # mean over all averaged tasks, in percent; None if there is none, or a task of it has no value
    average: float | None
    run: Mapping[str, Any]  # how it was computed: processes, requests computed and looked up, seconds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def task_results(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Collect version, shots, samples and metrics of each task and group from the results of lm-eval."""
    tasks = {}
    for name, values in raw["results"].items():
        metrics = {key: value for key, value in values.items() if isinstance(value, int | float) and "," in key}
        if not metrics:
            continue
        counts = raw.get("n-samples", {}).get(name, {})
        tasks[name] = {
            "version": raw["versions"].get(name),
            "shots": raw["n-shot"].get(name),
            "samples": counts.get("effective", values.get("sample_len")),
            "samples_of_task": counts.get("original"),
            "metrics": {key: value if math.isfinite(value) else None for key, value in metrics.items()},
        }
    return tasks


def entry_value(entry: TaskEntry, tasks: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the value of a task's metric, in percent; None if there is none."""
    metrics = tasks.get(entry.task, {}).get("metrics", {})
    if entry.metric:
        # A metric without a filter stands for the first of its filters.
        filtered = [name for name in metrics if name.startswith(f"{entry.metric},")]
        names = [entry.metric, f"{entry.metric},none", *filtered]
    else:  # lm-eval lists error estimates among the metrics
        names = [name for name in metrics if "_stderr" not in name][:1]
    value = next((metrics[name] for name in names if metrics.get(name) is not None), None)
    return None if value is None else 100 * float(value)


def column_values(suite: Suite, tasks: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, float], float | None]:
    """Return the means of complete columns, and of all averaged tasks; None if one has no value."""
    means = {column.name: _mean(column.tasks, tasks) for column in suite.columns}
    averaged = [entry for column in suite.columns if column.averaged for entry in column.tasks]
    columns = {name: mean for name, mean in means.items() if mean is not None}
    return columns, None if suite.average is None else _mean(averaged, tasks)


def _mean(entries: Sequence[TaskEntry], tasks: Mapping[str, Mapping[str, Any]]) -> float | None:
    found = [value for entry in entries if (value := entry_value(entry, tasks)) is not None]
    return sum(found) / len(found) if found and len(found) == len(entries) else None


def read_report(folder: Path) -> SuiteReport:
    """Read the report in a folder of results; raises DataError if there is none, or it is damaged."""
    file = folder / RESULTS
    try:
        return SuiteReport(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{file}: no readable results ({error}). Run the evaluation again.") from error


_Rows = list[list[str]]  # each begins with its name


def markdown_page(suite: Suite, report: SuiteReport) -> str:
    """Write the tables of a report as Markdown."""
    heads, rows = _comparison(suite, report)
    lines = [f"# {_plain(suite.title)}: {_plain(str(report.model['path']))}", ""]
    lines += [_plain(note) + "\n" for note in _notes(suite, report)]
    lines += [*_markdown_table(["model", *heads], rows), ""]
    lines += _markdown_table(["task", *_TASK_HEADS], _task_rows(report))
    return "\n".join(lines) + "\n"


def html_page(suite: Suite, report: SuiteReport) -> str:
    """Write the tables of a report as an HTML page, which loads nothing."""
    heads, rows = _comparison(suite, report)
    parts = [
        *map(paragraph, _notes(suite, report)),
        table(["model", *heads], rows, caption="Results in percent", marked=0),
        table(["task", *_TASK_HEADS], _task_rows(report), caption="Tasks"),
    ]
    return page(f"{suite.title}: {report.model['path']}", parts)


_TASK_HEADS = ["version", "shots", "samples", "metric", "value"]


def _comparison(suite: Suite, report: SuiteReport) -> tuple[list[str], _Rows]:
    heads = [f"{column.name}{' (lower is better)' if column.lower_is_better else ''}" for column in suite.columns]
    names = [column.name for column in suite.columns]
    own = {**report.columns}
    if suite.average is not None:
        heads.append(suite.average)
        names.append(suite.average)
        own |= {suite.average: report.average} if report.average is not None else {}
    rows = [[str(report.model["path"]), *_cells(own, names)]]
    published = suite.published.rows if suite.published is not None else {}
    return heads, rows + [[name, *_cells(values, names)] for name, values in published.items()]


def _cells(values: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [f"{values[name]:.1f}" if name in values else "-" for name in names]


def _task_rows(report: SuiteReport) -> _Rows:
    return [
        [
            name,
            str(task["version"]),
            str(task["shots"]),
            str(task["samples"]),
            metric,
            "-" if value is None else f"{value:.4f}",
        ]
        for name, task in report.tasks.items()
        for metric, value in task["metrics"].items()
        if "_stderr" not in metric
    ]


def _notes(suite: Suite, report: SuiteReport) -> list[str]:
    model, harness = report.model, report.harness
    notes = [
        f"Model {model['sha256'][:16]}, {model['dtype']}, {model['parameters']:,} parameters; {harness['name']} "
        f"{harness['version']}, seed {harness['seed']}."
    ]
    if report.settings["limit"] is not None:
        notes.append(f"At most {report.settings['limit']} samples of each task: not comparable with complete results.")
    if suite.published is not None:
        notes.append(f"Other rows: {suite.published.source}. {suite.published.note}".strip())
    return notes


def _markdown_table(heads: Sequence[str], rows: _Rows) -> list[str]:
    lines = ["| " + " | ".join(map(_plain, heads)) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    return lines + ["| " + " | ".join(map(_plain, row)) + " |" for row in rows]


def _plain(text: str) -> str:
    """Escape what Markdown would read as a table, as HTML or as a link."""
    escaped = escape_controls(text).replace("\\", "\\\\")
    for character in "|<>[]`*_":
        escaped = escaped.replace(character, f"\\{character}")
    return escaped.replace("\n", " ")
