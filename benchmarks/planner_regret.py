"""Regret of the planner in published sweeps: excess time of the layout ranked first over the best measured layout.

A sweep is one model (layers, width, heads) on one number of devices with one global batch, of which a source measured
three layouts or more. Constants are fitted on all other sources, as in planner_accuracy.py. "plainest" is the choice of
``hlat plan``: the plainest of the layouts that its tie rule treats as equal.

    python benchmarks/planner_regret.py published_runs.csv [--sweeps gpt-39.1b gpt-175b bloom]
"""

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

from planner_accuracy import Runs, fit
from results import Recorder

RECOMPUTE = ("none", "selective", "full")


def sweep_of(run):
    row = run.row
    shape = tuple(int(float(row[name])) for name in ("layers", "hidden", "heads"))
    return run.group, row["model"], run.chips, row["global_batch"], row["seq_len"], shape


def plainness(run):
    split = run.workload.layout
    again = RECOMPUTE.index(split.recompute)
    return split.tensor > 8, split.pipeline > 1, again, split.tensor, split.pipeline, split.context, split.virtual


def main():
    from hlat.planner.search import TIE_TOLERANCE
    from published_runs.runs import read_published_runs

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--sweeps", nargs="*", default=["gpt-", "bloom"], help="beginnings of the names of models")
    arguments, record = parser.parse_args(), Recorder(__file__, "planner.md")
    found, _ = read_published_runs(arguments.file)
    runs = Runs([run for run in found if run.tokens_per_second])
    sweeps = defaultdict(list)
    for index, run in enumerate(runs.runs):
        if run.row["model"].startswith(tuple(arguments.sweeps)):
            sweeps[sweep_of(run)].append(index)
    sweeps = {key: indices for key, indices in sweeps.items() if len(indices) >= 3}
    held_out = {}
    for group in {key[0] for key in sweeps}:
        rows = runs.group == group
        held_out[group] = runs.measured * (1 + runs.errors(fit(runs, ~rows & ~runs.suspect)))
    print(f"{'sweep':58} {'n':>3} {'fastest':>9} {'plainest':>9} {'rank':>5} {'order':>6} {'worst':>7}")
    regrets = []
    for key, indices in sorted(sweeps.items()):
        measured, predicted = runs.measured[indices], held_out[key[0]][indices]
        best = measured.min()
        fastest = int(np.argmin(predicted))
        tied = [
            candidate
            for candidate in range(len(indices))
            if predicted[candidate] <= (1 + TIE_TOLERANCE) * predicted.min()
        ]
        chosen = min(tied, key=lambda index: (*plainness(runs.runs[indices[index]]), predicted[index]))
        order = np.corrcoef(np.argsort(np.argsort(measured)), np.argsort(np.argsort(predicted)))[0, 1]
        regrets.append((measured[fastest] / best - 1, measured[chosen] / best - 1, len(indices)))
        name = f"{key[1]} {key[5]}, {key[2]} devices, batch {key[3]}"
        rank = int(np.sum(measured < measured[fastest])) + 1
        print(
            f"{name:58} {len(indices):3} {regrets[-1][0]:9.1%} {regrets[-1][1]:9.1%} {rank:5} {order:6.2f} "
            f"{measured.max() / best - 1:7.0%}"
        )
        percent = {"peer": "best measured layout", "peer_values": 0}
        record.add(f"regret of the planner: {name}, {len(indices)} layouts", "%", 100 * regrets[-1][1], **percent)
    means = np.mean(regrets, axis=0)
    print(f"{'mean':58} {'':3} {means[0]:9.1%} {means[1]:9.1%}")
    record.write()


if __name__ == "__main__":
    main()
