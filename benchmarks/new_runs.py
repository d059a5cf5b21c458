"""Predictions of runs that the planner has never seen, written down before anyone compares them, and their errors.

    runs of a set --measured columns blanked--> reader -> shipped constants and intervals -> its predictions  (predict)
    predictions, runs -> errors by source, chips, layout; coverage of intervals; worst rows                   (compare)

The sets are new_runs.csv (first), new_runs_2.csv to new_runs_4.csv (second, third, fourth) in benchmarks/published.

The baseline of a row is FLOPs / (peak x e), with e the median over the sources of the known table (``--known``), by
chip family and precision; a family without known runs takes the median over all families.

    python benchmarks/new_runs.py predict --known published_runs.csv
    python benchmarks/new_runs.py compare
    python benchmarks/new_runs.py join --known published_runs.csv --out both.csv      # known runs and a set, one table
    python benchmarks/new_runs.py predict --set second --known both.csv
    python benchmarks/planner_errors.py both.csv --json    # the intervals that ship (planner/cost/intervals.yaml)
"""

import argparse
import csv
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

from hlat.planner.cost.calibration import shipped_interval
from hlat.planner.problem.workload import WorkloadColumns
from published_runs.accuracy import layout_kind
from published_runs.one_constant import ideal_steps
from published_runs.program import run_steps
from published_runs.published_memory import memory_reading, predicted_gib
from published_runs.runs import read_published_runs
from results import Recorder

FOLDER = Path(__file__).parent / "published"
SETS = {"first": "", "second": "_2", "third": "_3", "fourth": "_4"}  # ends of the files' names
MEASURED = ("tokens_per_s_per_chip", "step_time_s", "tflops_per_chip", "mfu", "memory_per_chip_gib", "tok_s_chip_norm",
            "norm_basis", "mfu_norm_causal_bf16peak", "tokens_per_s", "samples_per_s", "hfu", "quotation",
            "outcome")  # fmt: skip
COLUMNS = ("id", "source", "family", "layout", "step_seconds", "low", "high", "tokens_per_s_per_chip", "memory_gib",
           "one_constant_step_seconds", "spread", "assumed", "skipped")  # fmt: skip


def family(run):
    return run.workload.device.family + " fp8" * run.workload.software.eight_bit


def blanked(file, folder):
    """A copy of the table without what was measured."""
    with file.open(encoding="utf-8", newline="") as source:
        rows = list(csv.DictReader(source))
    copy = Path(folder) / file.name
    with copy.open("w", encoding="utf-8", newline="") as target:
        table = csv.DictWriter(target, rows[0])
        table.writeheader()
        table.writerows({name: "" if name in MEASURED else text for name, text in row.items()} for row in rows)
    return copy


def known_efficiencies(file):
    """Median over sources of the share of the peak that their runs reach, by family; "" for all families."""
    runs = [run for run in read_published_runs(file)[0] if run.tokens_per_second]
    reached = ideal_steps(WorkloadColumns([run.workload for run in runs])) / [run.step_seconds for run in runs]
    by_source = defaultdict(lambda: defaultdict(list))
    for run, share in zip(runs, reached, strict=True):
        for name in (family(run), ""):
            by_source[name][run.group].append(share)
    return {name: np.median([np.median(one) for one in sources.values()]) for name, sources in by_source.items()}


def files(name):
    """The runs and the predictions of a set."""
    return FOLDER / f"new_runs{SETS[name]}.csv", FOLDER / f"predictions{SETS[name]}.csv"


def predict(known, name):
    measured, predictions = files(name)
    with tempfile.TemporaryDirectory() as folder:
        runs, skipped = read_published_runs(blanked(measured, folder))
    columns = WorkloadColumns([run.workload for run in runs])
    steps, ideal, efficiencies = run_steps(columns).step, ideal_steps(columns), known_efficiencies(known)
    rows = []
    for index, (run, memory) in enumerate(zip(runs, predicted_gib(runs), strict=True)):
        seconds = float(steps[index])
        device, software = run.workload.device, run.workload.software
        # The shipped interval of a family with borrowed constants is wider already.
        reading = sum(one.spread**2 for one in run.readings if one.column != "family") ** 0.5
        interval = shipped_interval(device.family, eight_bit=software.eight_bit).widened(reading)
        low, high = interval.of(seconds)
        efficiency = efficiencies.get(family(run), efficiencies[""])
        rows.append({
            "id": run.name, "source": run.group, "family": family(run), "layout": layout_kind(run.workload.layout),
            "step_seconds": f"{seconds:.6g}", "low": f"{low:.6g}", "high": f"{high:.6g}",
            "tokens_per_s_per_chip": f"{run.tokens_per_step / seconds / run.chips:.6g}",
            "memory_gib": f"{memory:.4g}" if memory_reading(run).instrument else "",
            "one_constant_step_seconds": f"{ideal[index] / efficiency:.6g}",
            "spread": f"{run.spread:.3g}", "assumed": "; ".join(run.assumed), "skipped": "",
        })  # fmt: skip
    rows += [{"id": row.name, "source": row.group, "skipped": row.reason} for row in skipped]
    with predictions.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(sorted(rows, key=lambda row: row["id"]))
    print(f"{len(runs)} rows predicted, {len(skipped)} cannot be read")


def read_errors(name):
    """Rows of a set that were predicted and measured, with their errors of step time."""
    measured, predictions = files(name)
    with predictions.open(encoding="utf-8", newline="") as file:
        predictions = {row["id"]: row for row in csv.DictReader(file)}
    found = []
    for run in read_published_runs(measured)[0]:
        row = predictions[run.name]
        if run.step_seconds is None or row["skipped"]:
            continue
        # Tokens of a step cancel: the reading of the global batch may have changed since the prediction.
        ratio = float(row["tokens_per_s_per_chip"]) / run.tokens_per_second
        step = float(row["step_seconds"])
        compared = run.memory_gib is not None and row["memory_gib"]
        memory = float(row["memory_gib"]) / run.memory_gib - 1 if compared else None
        found.append(row | {
            "subset": run.row["subset"], "model": run.row["model"], "error": 1 / ratio - 1,
            "baseline": float(row["one_constant_step_seconds"]) / step / ratio - 1,
            "inside": float(row["low"]) / step <= ratio <= float(row["high"]) / step,
            "memory_error": memory,
        })  # fmt: skip
    return found


def weighted(rows, name):
    """Mean absolute, median absolute and signed mean of an error, over rows; and the mean over sources."""
    values = np.array([row[name] for row in rows])
    sources = [np.mean([abs(row[name]) for row in rows if row["source"] == one]) for one in {r["source"] for r in rows}]
    return np.abs(values).mean(), np.median(np.abs(values)), values.mean(), np.mean(sources)


def compare(name):
    record = Recorder(__file__, "planner.md")
    rows = read_errors(name)
    print(
        "Errors of step times, in percent: mean |e|, median |e|, signed mean; mean over sources; one constant; inside"
    )
    for key in ("source", "family", "layout", "subset"):
        groups = defaultdict(list)
        for row in rows:
            groups[row[key]].append(row)
        print(f"\n{key}")
        for value, group in sorted(groups.items()):
            _line(value, group)
    print()
    _line("all", rows)
    print("\nworst ten")
    for row in sorted(rows, key=lambda row: -abs(np.log1p(row["error"])))[:10]:
        print(f"{row['id']} {row['error']:+.0%} {row['family']} {row['layout']} {row['model']} {row['source'][:40]} "
              f"[{row['assumed']}]")  # fmt: skip
    memory = [row for row in rows if row["memory_error"] is not None]
    print("\nmemory: mean |e|, median |e|, signed mean, mean over sources")
    for source in sorted({row["source"] for row in memory}):
        ours = weighted([row for row in memory if row["source"] == source], "memory_error")
        print(f"{source[:56]:56} " + " ".join(f"{100 * value:6.1f}" for value in ours))
    _write_record(rows, record, name)


def join(known, out, name):
    """Write the known runs and those of a set as one table."""
    rows = []
    for path in (known, files(name)[0]):
        with path.open(encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file)
    with out.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), restval="")
        table.writeheader()
        table.writerows(rows)


def _line(name, group):
    ours, base = weighted(group, "error"), weighted(group, "baseline")
    inside = np.mean([row["inside"] for row in group])
    numbers = " ".join(f"{100 * value:6.1f}" for value in (*ours, base[0], base[3], 100 * inside / 100))
    print(f"{name[:56]:56} {len(group):4} {numbers}")


def _write_record(rows, record, name):
    ours, base = weighted(rows, "error"), weighted(rows, "baseline")
    peer = "one constant per chip family and precision"
    what = "mean absolute error of the step time of published runs, predicted before anyone compared them"
    ending = "" if name == "first" else f" ({name} set)"
    what += ending
    record.add(f"{what}: {len(rows)} runs", "1", float(ours[0]), peer=peer, peer_values=float(base[0]))
    record.add(f"{what}: mean over sources", "1", float(ours[3]), peer=peer, peer_values=float(base[3]))
    inside = float(np.mean([row["inside"] for row in rows]))
    record.add(f"share of these runs inside their 80 % interval{ending}", "1", inside, note="goal: 0.75 to 0.85")
    record.write("new_runs" + SETS[name])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("predict", "compare", "join"))
    parser.add_argument("--known", type=Path, help="table of the runs that the constants were fitted to")
    parser.add_argument("--out", type=Path, help="with join: table to write")
    parser.add_argument("--set", choices=tuple(SETS), default="first", help="set of runs")
    options = parser.parse_args()
    if options.action == "compare":
        compare(options.set)
    elif options.known is None or (options.action == "join" and options.out is None):
        parser.error("predict needs --known, for the baseline; join needs --known and --out")
    elif options.action == "join":
        join(options.known, options.out, options.set)
    else:
        predict(options.known, options.set)


if __name__ == "__main__":
    main()
