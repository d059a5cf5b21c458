"""Accuracy of the cost model on published runs, in three honest columns beside a baseline.

CSV file -> runs -> step times with priors | shipped constants | constants fitted without the source | one constant
                 -> predicted / measured - 1 -> by source, by chips, by layout; coverage of intervals; skipped rows
                 -> memory -> the same, for rows that report memory
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hlat.hardware import Catalog
from hlat.planner.cost.calibration import INTERVAL_SHARE
from hlat.planner.problem.workload import Column, StepLayout, WorkloadColumns
from published_runs.constants_fit import fit_constants, prior_constants
from published_runs.intervals import LeftOutErrors
from published_runs.one_constant import one_constant_steps
from published_runs.order import PairErrors
from published_runs.program import run_steps
from published_runs.published_memory import constant_gib, framework_of, memory_reading, predicted_gib
from published_runs.reader import RunChip
from published_runs.runs import PublishedRun, SkippedRow, read_published_runs

COLUMNS = ("prior_only", "fitted", "left_out", "one_constant")
"""Predictions compared: without a fit; with shipped constants; fitted without the source; the baseline without it."""

Row = dict[str, Any]


def prediction_errors(path: Path, catalog: Catalog | None = None) -> dict[str, Any]:
    """Predict every run of a CSV file and compare throughput and memory with the measured values.

    Args:
        path: table of runs; its columns are those of runs.py.
        catalog: chips and machines; None for the shipped ones.

    Returns:
        ``overall`` and ``groups``: n, mean, median and p90 of the absolute relative errors of the throughput, with the
        shipped constants. ``rows``: every run, with its readings. ``accuracy``: step time and throughput in the four
        ``COLUMNS``, by source, chips and layout; ``coverage``: of the 80 % intervals;
        ``intervals``: of every family; ``order``: of two layouts of one job. ``memory``: GiB per device.
        ``skipped``: rows that cannot be predicted: number, reasons, ids.

    Raises:
        PlanError: the file cannot be read or lacks required columns.
    """
    runs, skipped = read_published_runs(path, catalog)
    measured = [run for run in runs if run.tokens_per_second]
    rows = _rows(measured)
    unmeasured = [
        SkippedRow(run.name, run.group, "no throughput published") for run in runs if not run.tokens_per_second
    ]
    missing = [*skipped, *unmeasured]
    return {
        **_errors(rows),
        "accuracy": {
            "convention": "error = predicted / measured - 1; of the step time, negative is predicted too fast",
            "by_source": _table(rows, "source"),
            "by_chips": _table(rows, "family"),
            "by_layout": _table(rows, "layout"),
            "all": _columns(rows),
        },
        "coverage": _coverage(rows),
        "intervals": _intervals(rows),
        "chips": _chips(measured),
        "order": _order(rows),
        "memory": _memory([run for run in runs if run.memory_gib]),
        "skipped": {
            "count": len(missing),
            "reasons": dict(Counter(row.reason for row in missing).most_common()),
            "rows": [{"id": row.name, "source": row.group, "reason": row.reason} for row in missing],
        },
    }


def _rows(runs: list[PublishedRun]) -> list[Row]:
    if not runs:
        return []
    columns = WorkloadColumns([run.workload for run in runs])
    measured = np.array([run.step_seconds for run in runs], dtype=float)
    sources, families = [run.group for run in runs], [_family(run) for run in runs]
    steps = {
        "prior_only": run_steps(columns, prior_constants()).step,
        "fitted": run_steps(columns).step,
        "left_out": _left_out_steps(columns, measured, sources),
        "one_constant": one_constant_steps(columns, measured, np.array(sources), np.array(families)),
    }
    errors = LeftOutErrors(measured / steps["left_out"], families, sources, [run.spread for run in runs])
    rows = []
    for index, run in enumerate(runs):
        seconds = float(steps["fitted"][index])
        predicted = run.tokens_per_step / seconds / run.chips
        assert run.tokens_per_second is not None, "only measured runs are compared"
        interval = errors.interval(families[index], without=run.group).widened(run.spread)
        left_out = float(steps["left_out"][index])
        rows.append(
            {
                "id": run.name,
                "source": run.group,
                "model": run.row.get("model", ""),
                "chip": run.row["chip"],
                "family": families[index],
                "layout": layout_kind(run.workload.layout),
                "job": _job(run),
                "measured": run.tokens_per_second,
                "predicted": predicted,
                "error": predicted / run.tokens_per_second - 1,
                "step_seconds": seconds,
                "measured_step_seconds": float(measured[index]),
                "step_errors": {name: _known(steps[name][index] / measured[index] - 1) for name in COLUMNS},
                "interval_seconds": [left_out * interval.low, left_out * interval.high],
                "spread": run.spread,
                "assumed": list(run.assumed),
                "readings": [reading.to_dict() for reading in run.readings],
            }
        )
    return rows


def _job(run: PublishedRun) -> list[str | float]:
    """Source, and what a run has in common with others of it that differ in the layout only."""
    names = ("model", "chip", "seq_len", "framework", "precision")
    return [run.group, *(run.row.get(name, "") for name in names), run.chips, run.tokens_per_step]


def _known(error: float) -> float | None:
    """The error; None for NaN, which JSON has not."""
    return None if np.isnan(error) else float(error)


def _family(run: PublishedRun) -> str:
    """Chip family and precision, whose runs share constants."""
    return run.workload.device.family + (" fp8" if run.workload.software.eight_bit else "")


def layout_kind(layout: StepLayout) -> str:
    """Kind of a layout, by the axes whose communication differs."""
    if layout.context > 1:
        return "TP+CP" if layout.tensor > 1 else "CP"
    if layout.pipeline > 1:
        return "TP+PP" if layout.tensor > 1 else "PP"
    sharded = "ZeRO-3" if layout.zero == 3 else "DP/ZeRO-1,2"
    return f"TP+{sharded}" if layout.tensor > 1 else sharded


def _left_out_steps(columns: WorkloadColumns, measured: Column, sources: Sequence[str]) -> Column:
    """Step times of each run, with the constants fitted to the runs of all other sources."""
    groups = np.array(sources)
    steps = np.empty(len(measured))
    for name in np.unique(groups):
        rows = groups == name
        others = fit_constants(columns.take(~rows), measured[~rows], groups[~rows])
        steps[rows] = run_steps(columns.take(rows), others).step
    return steps


def left_out_errors(path: Path, catalog: Catalog | None = None) -> LeftOutErrors:
    """Errors of the runs of a file, each with its source left out, from which intervals by family follow.

    Args:
        path: table of runs.
        catalog: chips and machines; None for the shipped ones.

    Raises:
        PlanError: the file cannot be read or lacks required columns.
    """
    return _errors_left_out(_rows([run for run in read_published_runs(path, catalog)[0] if run.tokens_per_second]))


def _errors_left_out(rows: list[Row]) -> LeftOutErrors:
    ratios = np.array([1 / (1 + row["step_errors"]["left_out"]) for row in rows])
    families, sources, spreads = ([row[name] for row in rows] for name in ("family", "source", "spread"))
    return LeftOutErrors(ratios, families, sources, spreads)


def _intervals(rows: list[Row]) -> dict[str, dict[str, float | int]]:
    """Intervals of all families, and the pooled one of families without runs."""
    errors = _errors_left_out(rows)
    found = {name: errors.interval(name) for name in sorted({row["family"] for row in rows})}
    found["pooled"] = errors.interval("")
    return {
        name: {
            "low": round(one.low, 3),
            "median": round(one.median, 3),
            "high": round(one.high, 3),
            "sources": one.sources,
        }
        for name, one in found.items()
    }


def _chips(runs: Sequence[PublishedRun]) -> dict[str, int]:
    """Number of sources by chip of the catalog."""
    sources = defaultdict(set)
    for run in runs:
        found = next(reading.value for reading in run.readings if reading.column == "chip")
        assert isinstance(found, RunChip), "the reading of a chip"
        sources[found.chip.name].add(run.group)
    return {name: len(groups) for name, groups in sorted(sources.items())}


def _order(rows: list[Row]) -> dict[str, float | int | None]:
    """Statistics of the order of two layouts of one job (order.py)."""
    left_out = np.array([1 + row["step_errors"]["left_out"] for row in rows])
    measured = np.array([row["measured_step_seconds"] for row in rows])
    pairs = PairErrors(1 / left_out, left_out * measured, [tuple(row["job"]) for row in rows])
    near, far = pairs.ordered()
    return {
        "ratio": round(pairs.undecided_ratio(), 3),
        "pairs": pairs.pairs,
        "sources": pairs.sources,
        "right_below": near,
        "right_above": far,
    }


def _coverage(rows: list[Row]) -> dict[str, Any]:
    """Share of runs within their interval, which no run of their own source has entered."""
    groups = defaultdict(list)
    for row in rows:
        low, high = row["interval_seconds"]
        inside = low <= row["measured_step_seconds"] <= high
        groups[row["family"]].append((row["source"], inside, high / low))
    return {"aimed": INTERVAL_SHARE, "all": _covered([one for group in groups.values() for one in group])} | {
        "by_chips": {name: _covered(group) for name, group in sorted(groups.items())}
    }


def _covered(runs: list[tuple[str, bool, float]]) -> dict[str, float | int | None]:
    """Coverage of runs, and of sources (each weighs the same), with the median ratio of an interval's ends."""
    if not runs:
        return {"n": 0, "sources": 0, "runs_inside": None, "sources_inside": None, "ratio_of_ends": None}
    by_source = defaultdict(list)
    for source, inside, _ in runs:
        by_source[source].append(inside)
    return {
        "n": len(runs),
        "sources": len(by_source),
        "runs_inside": float(np.mean([inside for _, inside, _ in runs])),
        "sources_inside": float(np.mean([np.mean(inside) for inside in by_source.values()])),
        "ratio_of_ends": float(np.median([ratio for *_, ratio in runs])),
    }


def _memory(runs: list[PublishedRun]) -> dict[str, Any]:
    """Errors of readings whose instrument is known; the others with the reason."""
    comparable = [run for run in runs if memory_reading(run).instrument is not None]
    others = [run for run in runs if memory_reading(run).instrument is None]
    return {
        **_errors(_memory_rows(comparable)),
        "not_comparable": [
            {"id": run.name, "source": run.group, "reason": memory_reading(run).reason} for run in others
        ],
    }


def _memory_rows(runs: list[PublishedRun]) -> list[Row]:
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
                "instrument": memory_reading(run).instrument,
                "measured_gib": run.memory_gib,
                "predicted_gib": predicted,
                "error": predicted / run.memory_gib - 1,
                "constant_gib": constant_gib(run),
            }
        )
    return rows


def _table(rows: list[Row], key: str) -> dict[str, Any]:
    groups = defaultdict(list)
    for row in rows:
        groups[row[key]].append(row)
    return {name: _columns(group) for name, group in sorted(groups.items())}


def _columns(rows: list[Row]) -> dict[str, Any]:
    """Statistics of each of the ``COLUMNS``."""
    return {name: _signed([row["step_errors"][name] for row in rows]) for name in COLUMNS}


def _signed(errors: list[float | None]) -> dict[str, float | int | None]:
    """Absolute and signed errors of step times, and of the throughputs that follow from them."""
    known = np.array([error for error in errors if error is not None])
    if not len(known):
        names = ("mean", "median", "p90", "signed_mean", "signed_median", "throughput_mean", "throughput_median")
        return {"n": 0} | dict.fromkeys(names)
    throughput = 1 / (1 + known) - 1
    return _statistics(list(known)) | {
        "signed_mean": float(known.mean()),
        "signed_median": float(np.median(known)),
        "throughput_mean": float(np.abs(throughput).mean()),
        "throughput_median": float(np.median(np.abs(throughput))),
    }


def _errors(rows: list[Row]) -> dict[str, Any]:
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
