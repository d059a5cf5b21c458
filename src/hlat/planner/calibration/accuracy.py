"""Accuracy of the cost model on published runs: the error of every run, and statistics per source.

CSV file -> runs -> step times -> predicted / measured - 1 -> overall, by source, by row; skipped rows with reasons
                 -> memory     -> the same, for rows that report memory
"""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from hlat.planner.calibration.published_memory import constant_gib, framework_of, predicted_gib
from hlat.planner.calibration.published_runs import PublishedRun, read_published_runs
from hlat.planner.cost import step_times
from hlat.planner.problem import WorkloadColumns


def prediction_errors(path: Path) -> dict[str, Any]:
    """Predict every run of a CSV file and compare throughput and memory with the measured values.

    Args:
        path: table of runs; its columns are those of published_runs.py.

    Returns:
        ``overall`` and ``groups``: n, mean, median and p90 of the absolute relative errors. ``rows``: every run.
        ``memory``: the same three for GiB per device. ``skipped``: rows that cannot be predicted: number, reasons, ids.

    Raises:
        PlanError: the file cannot be read or lacks required columns.
    """
    runs, skipped = read_published_runs(path)
    measured = [run for run in runs if run.tokens_per_second]
    rows = _rows(measured)
    reasons = Counter(row.reason for row in skipped)
    unmeasured = [run for run in runs if not run.tokens_per_second]
    if unmeasured:
        reasons["no throughput published"] = len(unmeasured)
    return {
        **_errors(rows),
        "memory": _errors(_memory_rows([run for run in runs if run.memory_gib])),
        "skipped": {
            "count": len(skipped) + len(unmeasured),
            "reasons": dict(reasons.most_common()),
            "rows": [{"id": row.name, "source": row.group, "reason": row.reason} for row in skipped]
            + [{"id": run.name, "source": run.group, "reason": "no throughput published"} for run in unmeasured],
        },
    }


def _rows(runs: list[PublishedRun]) -> list[dict[str, Any]]:
    if not runs:
        return []
    steps = step_times(WorkloadColumns([run.workload for run in runs])).step
    rows = []
    for run, seconds in zip(runs, steps, strict=True):
        layout = run.workload.layout
        predicted = layout.global_batch * layout.sequence / float(seconds) / run.chips
        assert run.tokens_per_second is not None, "only measured runs are compared"
        rows.append(
            {
                "id": run.name,
                "source": run.group,
                "model": run.row.get("model", ""),
                "chip": run.row["chip"],
                "measured": run.tokens_per_second,
                "predicted": predicted,
                "error": predicted / run.tokens_per_second - 1,
                "step_seconds": float(seconds),
                "assumed": list(run.assumed),
            }
        )
    return rows


def _memory_rows(runs: list[PublishedRun]) -> list[dict[str, Any]]:
    rows = []
    for run, predicted in zip(runs, predicted_gib(runs), strict=True):
        assert run.memory_gib is not None, "only measured runs are compared"
        rows.append(
            {
                "id": run.name,
                "source": run.group,
                "model": run.row.get("model", ""),
                "chip": run.row["chip"],
                "framework": framework_of(run),
                "measured_gib": run.memory_gib,
                "predicted_gib": predicted,
                "error": predicted / run.memory_gib - 1,
                "constant_gib": constant_gib(run),
            }
        )
    return rows


def _errors(rows: list[dict[str, Any]]) -> dict[str, Any]:
    groups = defaultdict(list)
    for row in rows:
        groups[row["source"]].append(row["error"])
    return {
        "overall": _statistics([row["error"] for row in rows]),
        "groups": {name: _statistics(errors) for name, errors in sorted(groups.items())},
        "rows": rows,
    }


def _statistics(errors: list[float]) -> dict[str, float | int | None]:
    if not errors:
        return {"n": 0, "mean": None, "median": None, "p90": None}
    sizes = np.abs(np.array(errors))
    return {
        "n": len(errors),
        "mean": float(sizes.mean()),
        "median": float(np.median(sizes)),
        "p90": float(np.percentile(sizes, 90)),
    }
