"""The report of a suite on a model: what ran in which version, and the columns of its table.

results of lm-eval --column_values--> columns in percent, average --SuiteReport--> results.json
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlat.evaluation.harness.suites import Column, Suite, TaskEntry
from hlat.runtime.errors import DataError

RESULTS = "results.json"


@dataclass(frozen=True)
class SuiteReport:
    """Results of a suite.

    Attributes:
        suite: name of the suite.
        model: path, sha256, dtype and number of parameters of the model.
        harness: name and version of the program that defines the tasks, and its seeds.
        settings: what else decides about the results: limit, maximum lengths.
        tasks: for each task its version, shots, samples and metrics.
        columns: values in percent, by column; a column in which a task has no value is missing.
        average: mean over all averaged tasks, in percent; None if there is none, or a task of it has no value.
        run: how it was computed: processes, requests computed and looked up, seconds.
    """

    suite: str
    model: Mapping[str, Any]
    harness: Mapping[str, Any]
    settings: Mapping[str, Any]
    tasks: Mapping[str, Mapping[str, Any]]
    columns: Mapping[str, float]
    average: float | None
    run: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
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
    names = [entry.metric, f"{entry.metric},none"] if entry.metric else [_first(metrics)]
    names += [name for name in metrics if entry.metric and name.startswith(f"{entry.metric},")]
    value = next((metrics[name] for name in names if metrics.get(name) is not None), None)
    return None if value is None else 100 * float(value)


def _first(metrics: Mapping[str, Any]) -> str:
    """Name of the first metric that is not an error estimate."""
    return next((name for name in metrics if "_stderr" not in name), "")


def column_values(suite: Suite, tasks: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, float], float | None]:
    """Compute the columns and the average of a suite.

    Returns:
        The mean over the tasks of each column in which every task has a value; and the mean over all averaged tasks,
        each counted once, or None if one has no value.
    """
    columns = {column.name: value for column in suite.columns if (value := _mean(column, tasks)) is not None}
    values = [entry_value(entry, tasks) for column in suite.columns if column.averaged for entry in column.tasks]
    found = [value for value in values if value is not None]
    complete = suite.average is not None and found and len(found) == len(values)
    return columns, sum(found) / len(found) if complete else None


def _mean(column: Column, tasks: Mapping[str, Mapping[str, Any]]) -> float | None:
    values = [entry_value(entry, tasks) for entry in column.tasks]
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found and len(found) == len(values) else None


def read_report(folder: Path) -> SuiteReport:
    """Read the report that was written to a folder of results.

    Raises:
        DataError: there is none, or it is damaged.
    """
    file = folder / RESULTS
    try:
        return SuiteReport(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{file}: no readable results ({error}). Run the evaluation again.") from error
