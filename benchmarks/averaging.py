"""Averages of the last checkpoints of a run at constant learning rate, beside the checkpoints themselves.

HLAT's 70B model is the mean of two late checkpoints, which scores 0.5 points more than either (arXiv 2404.10630, table
IV). Here a model of 1.3 M parameters (width 128, 4 layers, vocabulary 4096) is trained for 1,500 steps of 1,024 tokens
at constant rate after the warm-up, with several seeds; a checkpoint every 50 steps. Validation loss on the complete
validation split of the newest checkpoint, of the best one among the averaged ones, and of averages of the last 2, 5
and 10: uniform, and exponential with decay 0.8. Finished runs in FOLDER are not repeated.

    python benchmarks/averaging.py books.parquet --folder FOLDER [--seeds 0 1 2]
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from results import Recorder

RECIPE = """
model: {vocab_size: 4096, layers: 4, hidden_size: 128, intermediate_size: 344, heads: 4, kv_heads: 4}
data: {sequence_length: 128, tokenizer: {vocab_size: 4096}, validation: {fraction: 0.005}}
batch: {global_batch: 8, micro_batch: 8}
optimizer: {lr: 2.0e-3}
schedule: {kind: constant}
training: {log_every: 50}
evaluation: {every_steps: null}
checkpoint: {keep_last: 10, background: false}
precision: {mode: fp32}
tracking: {console: none, tensorboard: false}
"""
NEWEST, BEST = "newest checkpoint", "best of the last 10 checkpoints"
AVERAGES = {
    "mean of the last 2": {"last": 2},
    "mean of the last 5": {"last": 5},
    "mean of the last 10": {"last": 10},
    "exponential mean of the last 10, decay 0.8": {"last": 10, "decay": 0.8},
}


def losses(folder, data, seed, steps):
    """Train one run to its end; return the validation losses of its last checkpoints and of their averages."""
    import hlat

    run, found = folder / f"seed-{seed}", folder / f"seed-{seed}.json"
    if found.exists():
        return json.loads(found.read_text())
    fields = {"data.path": data, "data.prepared_dir": folder / "data", "run.dir": run}
    words = [f"{name}={value}" for name, value in fields.items()]
    words += [f"training.steps={steps}", f"training.seed={seed}"]
    words += [f"checkpoint.every_steps={steps // 30}", f"schedule.warmup_steps={steps // 15}"]
    command = [sys.executable, "-m", "hlat", "train", str(folder / "recipe.yaml"), *words]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    single = [hlat.evaluate(checkpoint, folder / "data").loss for checkpoint in checkpoints]
    result = {NEWEST: single[-1], BEST: min(single)}
    for name, how in AVERAGES.items():
        out = folder / "average"
        shutil.rmtree(out, ignore_errors=True)
        result[name] = hlat.evaluate(hlat.average(run, out, **how), folder / "data").loss
    found.write_text(json.dumps(result))
    return result


def table(record, by_seed):
    """Print and record the loss of the newest checkpoint and of each average: by seed, mean, and difference."""
    print(f"| weights | {' | '.join(f'seed {seed}' for seed in by_seed)} | mean | minus newest, same seed |")
    print(f"|---|{'---|' * len(by_seed)}---|---|")
    newest = [found[NEWEST] for found in by_seed.values()]
    for name in next(iter(by_seed.values())):
        ends = [found[name] for found in by_seed.values()]
        gaps = [end - other for end, other in zip(ends, newest, strict=True)]
        spread = f" ± {statistics.stdev(gaps):.4f}" if len(gaps) > 1 else ""
        shown = " | ".join(f"{end:.4f}" for end in ends)
        print(f"| {name} | {shown} | {statistics.mean(ends):.4f} | {statistics.mean(gaps):+.4f}{spread} |")
        note = f"mean {statistics.mean(ends):.4f}; minus the newest checkpoint {statistics.mean(gaps):+.4f}{spread}"
        peer = {} if name == NEWEST else {"peer": NEWEST, "peer_values": newest}
        record.add(f"validation loss of the {name}, constant rate", "nats", ends, note=note, **peer)


def main():
    """Run the missing runs, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options, record = parser.parse_args(), Recorder(__file__, "checkpoints.md")
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "recipe.yaml").write_text(RECIPE)
    table(record, {seed: losses(options.folder, options.data, seed, options.steps) for seed in options.seeds})
    record.write()


if __name__ == "__main__":
    main()
