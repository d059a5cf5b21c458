"""Errors of the planner by half of the sources: which changes hold where they were not made.

benchmarks/published/halves.md has the rules.

known and new runs -> priors | shipped constants | each source left out | one constant -> tables by half, family, source

python benchmarks/halves.py --known published_runs.csv              # both halves, by family
python benchmarks/halves.py --known published_runs.csv --sources    # and by source
python benchmarks/halves.py --known published_runs.csv --save before.json; ... --against before.json
"""

import argparse
import hashlib
import json
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

from new_runs import join
from published_runs.accuracy import prediction_errors
from results import Recorder

COLUMNS = ("prior_only", "left_out", "fitted", "one_constant")


def half(source):
    """A or B, by the name of a source."""
    return "AB"[int(hashlib.sha256(source.encode()).hexdigest(), 16) % 2]


def groups_of(row, sources):
    """Groups that a row belongs to, in the order of the table."""
    table = "known" if row["id"].startswith("r") else "new"
    own = half(row["source"])
    names = [f"all {table}", "all", f"{own} {table}", f"{own} all", f"{own} {row['family']}", f"= {row['family']}",
             f"layout {row['layout']}"]  # fmt: skip
    return [*names, f"{own} {table} {row['source'][:44]}"] if sources else names


def line(rows, column):
    """Mean absolute and signed error in percent; nan where nothing is known."""
    errors = np.array([row["step_errors"][column] for row in rows if row["step_errors"][column] is not None])
    return (float(100 * np.abs(errors).mean()), float(100 * errors.mean())) if len(errors) else (np.nan, np.nan)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--known", type=Path, required=True)
    parser.add_argument("--sources", action="store_true", help="also a line per source")
    parser.add_argument("--save", type=Path, help="write the table as JSON")
    parser.add_argument("--against", type=Path, help="a saved table to compare the left-out errors with")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first, both = (Path(folder) / name for name in ("first.csv", "both.csv"))
        join(options.known, first, "first")
        join(first, both, "second")
        found = prediction_errors(both)
    groups = defaultdict(list)
    for row in found["rows"]:
        for name in groups_of(row, options.sources):
            groups[name].append(row)
    before = json.loads(options.against.read_text(encoding="utf-8")) if options.against else {}
    table = {name: {column: line(rows, column) for column in COLUMNS} for name, rows in sorted(groups.items())}
    print(f"{'':56}    n | " + " | ".join(f"{column:>14}" for column in COLUMNS) + " | before")
    for name, values in table.items():
        numbers = " | ".join(f"{mean:6.2f} {signed:+7.2f}" for mean, signed in values.values())
        old = f"{before[name]['left_out'][0]:6.2f}" if name in before else ""
        print(f"{name[:56]:56} {len(groups[name]):4} | {numbers} | {old}")
    print("coverage", found["coverage"]["all"], "order", found["order"])
    if options.save:
        options.save.write_text(json.dumps(table), encoding="utf-8")
    if options.record:
        record = Recorder(__file__, "planner.md")
        for name in ("A all", "B all", "all known", "all new"):
            mean, base = table[name]["left_out"][0], table[name]["one_constant"][0]
            claim = f"mean error of the step time, source left out, {name}, {len(groups[name])} runs"
            record.add(claim, "%", mean, peer="one constant", peer_values=base)
        record.write()


if __name__ == "__main__":
    main()
