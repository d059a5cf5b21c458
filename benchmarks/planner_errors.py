"""Errors of the planner's step times and memory on every run of a CSV file, and the intervals that follow from them.

published runs -> priors | shipped constants | each source left out | one constant -> tables, coverage, skipped rows

    python benchmarks/planner_errors.py published_runs.csv                                   # by source, chips, layout
    python benchmarks/planner_errors.py runs.csv --hardware mine.yaml --html accuracy.html
    python benchmarks/planner_errors.py both.csv --json     # also the intervals that ship (planner/cost/intervals.yaml)
"""

import argparse
import json
import sys
from pathlib import Path

from hlat.hardware import load_catalog
from hlat.runtime.errors import HlatError
from published_runs import accuracy_lines, accuracy_page, prediction_errors
from results import Recorder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="table of runs")
    parser.add_argument("--hardware", help="YAML file with more chips and machines")
    parser.add_argument("--html", type=Path, help="page to write")
    parser.add_argument("--json", action="store_true", help="print everything, every row with its readings")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    try:
        found = prediction_errors(options.file, load_catalog(options.hardware))
    except HlatError as error:
        sys.exit(str(error))
    print(json.dumps(found, indent=2) if options.json else "\n".join(accuracy_lines(found)))
    if options.html:
        options.html.write_text(accuracy_page(options.file.name, found), encoding="utf-8")
    if options.record:
        record, columns = Recorder(__file__, "planner.md"), found["accuracy"]["all"]
        claim = f"mean error of the step time, source left out, {columns['left_out']['n']} runs of {options.file.name}"
        mean, base = (100 * columns[name]["mean"] for name in ("left_out", "one_constant"))
        record.add(claim, "%", mean, peer="one constant", peer_values=base)
        record.write()


if __name__ == "__main__":
    main()
