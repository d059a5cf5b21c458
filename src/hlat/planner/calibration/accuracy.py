"""Predictions beside measurements: every row of a table of runs, its error, and the errors of each source.

CSV file -> runs -> step times -> predicted / measured - 1 -> overall, by source, by row; what was skipped and why
                 -> memory     -> the same, of rows that tell it
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
    """Errors of the prediction of every row; tokens per second, as a share of what was measured.

    Returns:
        ``overall`` and ``groups`` with n, mean, median and p90 of the absolute errors, ``rows``, ``memory`` with the
        same three for GiB per device, and ``skipped``: how many rows could not be predicted, by reason, and which.

    Raises:
        PlanError: the file cannot be read, or has not the columns of such a table.
    """
    runs, skipped = read_published_runs(path)
    measured = [run for run in runs if run.tokens_per_second]
    rows = _rows(measured)
    reasons = Counter(one.reason for one in skipped)
    without = [run for run in runs if not run.tokens_per_second]
    if without:
        reasons["no throughput published"] = len(without)
    return {
        **_errors(rows),
        "memory": _errors(_memory_rows([run for run in runs if run.memory_gib])),
        "skipped": {
            "count": len(skipped) + len(without),
            "reasons": dict(reasons.most_common()),
            "rows": [{"id": one.name, "source": one.group, "reason": one.reason} for one in skipped]
            + [{"id": run.name, "source": run.group, "reason": "no throughput published"} for run in without],
        },
    }


def _rows(runs: list[PublishedRun]) -> list[dict[str, Any]]:
    if not runs:
        return []
    steps = step_times(WorkloadColumns([run.work for run in runs])).step
    rows = []
    for run, seconds in zip(runs, steps, strict=True):
        split = run.work.split
        predicted = split.global_batch * split.sequence / float(seconds) / run.chips
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
