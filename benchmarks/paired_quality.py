"""Quality before and after changes of speed: validation losses of two checkouts of hlat with equal seeds.

Trains the model of precision_quality.py (10.6 M parameters, 2 x 128 tokens a step) on the same text, in each mode and
with each seed, in this checkout and in another. A paired difference has no part of what the seed decides, so that it
says more than means do: it is to be near 0 beside the spread between seeds, which is printed with it.

    python benchmarks/paired_quality.py books.parquet --before CHECKOUT --folder FOLDER [--steps N] [--seeds 0 1 2]

Runs are ordinary runs in FOLDER: after an interruption the same command resumes them, finished ones are not repeated.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from precision_quality import RECIPE
from results import ROOT, Recorder

MODES = ("fp32", "mixed", "bf16-sr")


def final_loss(checkout: Path, folder: Path, data: Path, mode: str, seed: int, steps: int) -> float:
    """Train one run to its end, unless it has ended before; return its last validation loss."""
    run = folder / f"{checkout.name}-{mode}-{seed}"
    overrides = [f"data.path={data}", f"data.prepared_dir={folder / checkout.name}", f"run.dir={run}"]
    overrides += [f"training.steps={steps}", f"precision.mode={mode}", f"training.seed={seed}"]
    overrides += ["checkpoint.every_steps=1000000"]
    if not (run / "metrics.jsonl").exists() or f'"step": {steps},' not in (run / "metrics.jsonl").read_text():
        command = [sys.executable, "-m", "hlat", "train", str(folder / "recipe.yaml"), *overrides]
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["val_loss"] for line in lines if "val_loss" in line][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--before", type=Path, required=True, help="checkout of hlat to compare with")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options, record = parser.parse_args(), Recorder(__file__, "precision.md")
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "recipe.yaml").write_text(RECIPE)
    before = options.before.resolve()
    print("| mode | before, by seed | now | now minus before | spread between seeds |\n|---|---|---|---|---|")
    for mode in MODES:
        ends = {}
        for seed in options.seeds:
            for checkout in (before, ROOT):
                key = checkout, seed
                ends[key] = final_loss(checkout, options.folder, options.data, mode, seed, options.steps)
        old, new = ([ends[checkout, seed] for seed in options.seeds] for checkout in (before, ROOT))
        gaps = [now - then for now, then in zip(new, old, strict=True)]
        shown = (", ".join(f"{value:{form}}" for value in values) for values, form in
                 ((old, ".4f"), (new, ".4f"), (gaps, "+.4f")))  # fmt: skip
        print(f"| {mode} | {' | '.join(shown)} | {statistics.stdev(old):.4f} |", flush=True)
        note = f"paired differences {', '.join(f'{gap:+.4f}' for gap in gaps)}"
        claim = f"validation loss of 10.6 M parameters after {options.steps} steps in {mode}"
        record.add(claim, "nats", new, peer=f"hlat in {before.name}", peer_values=old, note=note)
    record.write()


if __name__ == "__main__":
    main()
