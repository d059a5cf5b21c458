"""Score of the planner on a table of published runs: step times with their ranges, and its choice in sweeps.

    FILE -> rows {id, source, measured, predicted, low, high}, in seconds of a step; skipped {id, reason}
         --sweeps--> {source, model, chips, n, chosen, fastest_predicted, best, regret} of every sweep

    python benchmarks/published_runs/score.py runs.csv --json score.json
    python benchmarks/published_runs/score.py benchmarks/published/sweeps.csv --sweeps

A sweep is what one author measured of one model on one cluster with one batch, program and precision, in three layouts
or more that ran; a table whose notes begin with "sweep NAME;" names them itself. Runs that were out of memory belong to
it. The choice is the planner's rule: of those that are predicted to fit the plainest within 2 % of the fastest; the
one that needs least where none fits. ``regret`` is the measured step of the choice over the best one's, less 1; null
if the choice ran out of memory.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from hlat.planner.cost.calibration import shipped_interval
from hlat.planner.problem.workload import Column, WorkloadColumns
from hlat.planner.search import complexity, plainest
from published_runs.program import run_steps
from published_runs.published_memory import predicted_gib
from published_runs.runs import PublishedRun, read_published_runs

Score = dict[str, Any]
_COMMON = ("model", "chip", "n_chips", "seq_len", "global_batch", "framework", "precision", "layers", "hidden", "heads")
_FEWEST = 3  # layouts that ran


def score(file: Path, *, sweeps: bool) -> Score:
    """Predict every run of a CSV file; PlanError if it cannot be read or lacks required columns."""
    runs, skipped = read_published_runs(file)
    steps = run_steps(WorkloadColumns([run.workload for run in runs])).step if runs else np.zeros(0)
    rows = []
    for run, seconds in zip(runs, steps, strict=True):
        if run.step_seconds is not None:
            software, family = run.workload.software, run.workload.device.family
            low, high = shipped_interval(family, eight_bit=software.eight_bit).widened(run.spread).of(float(seconds))
            found = {"id": run.name, "source": run.group, "measured": run.step_seconds, "predicted": float(seconds)}
            rows.append(found | {"low": low, "high": high})
    missing = [{"id": row.name, "source": row.group, "reason": row.reason} for row in skipped]
    missing += [
        {"id": run.name, "source": run.group, "reason": "no throughput published"}
        for run in runs
        if run.step_seconds is None and not run.ran_out
    ]
    content: Score = {"unit": "seconds of a step", "rows": rows, "skipped": missing}
    return content | ({"sweeps": sweep_scores(runs, steps), "fits": _fits(runs)} if sweeps else {})


def sweep_scores(runs: Sequence[PublishedRun], steps: Column) -> list[Score]:
    """Choice of the planner's rule in every sweep; ``steps`` are predicted seconds."""
    sweeps = defaultdict(list)
    for index, run in enumerate(runs):
        if run.step_seconds is not None or run.ran_out:
            sweeps[_sweep(run)].append(index)
    found = []
    for members in sweeps.values():
        ran = [index for index in members if not runs[index].ran_out]
        if len({_layout(runs[index]) for index in ran}) >= _FEWEST:
            found.append(_choice(runs, steps, members, ran))
    return found


def _sweep(run: PublishedRun) -> tuple[str, ...]:
    named = (run.row.get("notes") or "").split(";")[0]
    return (run.group, named if named.startswith("sweep ") else "", *(run.row.get(name) or "" for name in _COMMON))


def _layout(run: PublishedRun) -> tuple[object, ...]:
    layout = run.workload.layout
    degrees = (layout.tensor, layout.pipeline, layout.context, layout.data, layout.virtual, layout.zero)
    return (*degrees, layout.replicas, layout.micro_batch, layout.recompute, layout.sequence_parallel)


def _choice(runs: Sequence[PublishedRun], steps: Column, members: list[int], ran: list[int]) -> Score:
    filled = dict(zip(members, memory_shares([runs[index] for index in members]), strict=True))
    fitting = [index for index in members if filled[index] <= 1] or [min(members, key=filled.__getitem__)]
    measured = {index: runs[index].step_seconds or 0.0 for index in ran}
    best, chosen = min(ran, key=measured.__getitem__), _chosen(runs, steps, fitting, filled)
    fastest = min(ran, key=steps.__getitem__)
    regret = measured[chosen] / measured[best] - 1 if chosen in measured else None
    return {
        "source": runs[best].group,
        "model": runs[best].row.get("model", ""),
        "chips": runs[best].chips,
        "n": len(members),
        "out_of_memory": len(members) - len(ran),
        "chosen": runs[chosen].name,
        "fastest_predicted": runs[fastest].name,
        "best": runs[best].name,
        "regret": regret,
        "regret_of_fastest": measured[fastest] / measured[best] - 1,
        "mean_of_layouts": float(np.mean(list(measured.values()))) / measured[best] - 1,
    }


def _chosen(runs: Sequence[PublishedRun], steps: Column, fitting: list[int], filled: dict[int, float]) -> int:
    workloads = [runs[index].workload for index in fitting]
    complexities = [complexity(one.layout, one.device.domain) for one in workloads]
    return fitting[plainest([steps[index] for index in fitting], [filled[index] for index in fitting], complexities)]


def memory_shares(runs: Sequence[PublishedRun]) -> list[float]:
    """Predicted memory of each run, as a share of its device's."""
    needed = predicted_gib(list(runs))
    return [gib * 2**30 / run.workload.device.memory_bytes for gib, run in zip(needed, runs, strict=True)]


def _fits(runs: Sequence[PublishedRun]) -> Score:
    """Verdicts on runs of tables that have some that were out of memory."""
    sources = {run.group for run in runs if run.ran_out}
    judged = [run for run in runs if run.group in sources and (run.ran_out or run.step_seconds is not None)]
    verdicts = [(run.ran_out, share <= 1) for run, share in zip(judged, memory_shares(judged), strict=True)]
    ran, out = ([fits for was_out, fits in verdicts if was_out == one] for one in (False, True))
    return {
        "ran": len(ran),
        "ran_said_to_fit": sum(ran) / max(len(ran), 1),
        "out_of_memory": len(out),
        "out_of_memory_said_not_to": out.count(False) / max(len(out), 1),
    }


def _lines(content: Score) -> list[str]:
    errors = defaultdict(list)
    for row in content["rows"]:
        inside = row["low"] <= row["measured"] <= row["high"]
        errors[row["source"]].append((abs(row["predicted"] / row["measured"] - 1), inside))
    lines = [f"{'source':60} {'n':>5} {'error':>6} {'in range':>8}"]
    for source, values in sorted(errors.items()):
        off, inside = np.mean(values, axis=0)
        lines.append(f"{source[:60]:60} {len(values):5} {off:6.1%} {inside:8.0%}")
    if errors:
        means = np.mean([np.mean(values, axis=0) for values in errors.values()], axis=0)
        lines.append(f"{'mean of sources':60} {len(content['rows']):5} {means[0]:6.1%} {means[1]:8.0%}")
    regrets = defaultdict(list)
    for sweep in content.get("sweeps", ()):
        regrets[sweep["source"]].append(sweep)
    for source, sweeps in sorted(regrets.items()):
        known = [sweep["regret"] for sweep in sweeps if sweep["regret"] is not None]
        fastest, mean = (
            np.mean([sweep[name] for sweep in sweeps]) for name in ("regret_of_fastest", "mean_of_layouts")
        )
        chosen = f"{np.mean(known):.1%}" if known else "-"
        lines.append(
            f"{source[:60]:60} {len(sweeps):3} sweeps: regret {chosen}, out of memory {len(sweeps) - len(known)}, "
            f"fastest of those that ran {fastest:.1%}, any layout {mean:.1%}"
        )
    return lines + ([f"fits: {content['fits']}"] if "fits" in content else [])


def main() -> None:
    """Print the score of a file, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--sweeps", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    content = score(options.file, sweeps=options.sweeps)
    print("\n".join(_lines(content)))
    if options.json is not None:
        options.json.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")


if __name__ == "__main__":
    main()
