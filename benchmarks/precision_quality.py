"""Cost of precision in quality: the same run in every mode, with several seeds.

A model of 10.6 M parameters (width 256, 8 layers, vocabulary 8192) is trained for 3,000 steps of 256 tokens in fp32,
mixed, bf16-sr, bf16-kahan and bf16; validation loss on 64 fixed windows. Runs are ordinary runs in FOLDER: after an
interruption the same command resumes them; finished ones are not repeated. Two run at a time on one thread each.

    python benchmarks/precision_quality.py books.parquet --folder FOLDER [--seeds 0 1 2] [--picture FILE.svg]

The picture needs matplotlib.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from results import Recorder

MODES = ("fp32", "mixed", "bf16-sr", "bf16-kahan", "bf16")

RECIPE = """
model: {vocab_size: 8192, layers: 8, hidden_size: 256, intermediate_size: 704, heads: 4, kv_heads: 4}
data: {sequence_length: 128, tokenizer: {vocab_size: 8192}, validation: {fraction: 0.02}}
batch: {global_batch: 2, micro_batch: 2}
optimizer: {lr: 6.0e-4}
schedule: {warmup_steps: 100, min_ratio: 0.1}
training: {log_every: 50}
evaluation: {every_steps: 250, sequences: 64}
checkpoint: {every_steps: 250, keep_last: 1}
tracking: {console: none, tensorboard: false}
"""


def train(folder, data, mode, seed, steps):
    """Train one run to its end; return its validation losses by step."""
    run = folder / f"{mode}-{seed}"
    overrides = [
        f"data.path={data}",
        f"data.prepared_dir={folder / 'data'}",
        f"run.dir={run}",
        f"training.steps={steps}",
    ]
    overrides += [f"precision.mode={mode}", f"training.seed={seed}"]
    command = [sys.executable, "-m", "hlat", "train", str(folder / "recipe.yaml"), *overrides]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}


def table(record, losses, seeds):
    """Print and record the final validation loss of each mode: by seed, mean, and difference from mixed."""
    print(f"| mode | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | minus mixed, same seed |")
    print(f"|---|{'---|' * len(seeds)}---|---|")
    last = {key: found[max(found)] for key, found in losses.items()}
    for mode in dict.fromkeys(mode for mode, _ in losses):
        ends = [last[mode, seed] for seed in seeds]
        gaps = [last[mode, seed] - last["mixed", seed] for seed in seeds]
        spread = f" ± {statistics.stdev(gaps):.4f}" if len(gaps) > 1 else ""
        shown = " | ".join(f"{end:.4f}" for end in ends)
        print(f"| {mode} | {shown} | {statistics.mean(ends):.4f} | {statistics.mean(gaps):+.4f}{spread} |")
        note = f"mean {statistics.mean(ends):.4f}; minus mixed with the same seed {statistics.mean(gaps):+.4f}{spread}"
        peer = {} if mode == "mixed" else {"peer": "mixed", "peer_values": [last["mixed", seed] for seed in seeds]}
        record.add(
            f"validation loss after {max(losses[mode, seeds[0]])} steps in {mode}", "nats", ends, note=note, **peer
        )


def picture(losses, seeds, file):
    """Plot validation loss minus that of fp32 with the same seed, over the steps: mean and range over the seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    steps = sorted(losses["fp32", seeds[0]])
    for mode in MODES[1:]:
        gaps = [[losses[mode, seed][step] - losses["fp32", seed][step] for seed in seeds] for step in steps]
        (line,) = axes.plot(steps, [statistics.mean(gap) for gap in gaps], label=mode)
        axes.fill_between(
            steps, [min(gap) for gap in gaps], [max(gap) for gap in gaps], color=line.get_color(), alpha=0.2
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="step", ylabel="validation loss minus that of fp32, nats")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)


def main():
    """Run the missing runs, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--picture", type=Path)
    options, record = parser.parse_args(), Recorder(__file__, "precision.md")
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "recipe.yaml").write_text(RECIPE)
    prepare = [
        sys.executable,
        "-m",
        "hlat",
        "data",
        "prepare",
        str(options.folder / "recipe.yaml"),
        "training.steps=1000",
    ]
    folders = [f"data.path={options.data}", f"data.prepared_dir={options.folder / 'data'}"]
    subprocess.run([*prepare, *folders], check=True, stdout=subprocess.DEVNULL)
    runs = [(mode, seed) for seed in options.seeds for mode in MODES]
    with ThreadPoolExecutor(options.at_once) as pool:
        found = pool.map(lambda run: train(options.folder, options.data, *run, options.steps), runs)
        losses = dict(zip(runs, found, strict=True))
    table(record, losses, options.seeds)
    record.write()
    if options.picture:
        picture(losses, options.seeds, options.picture)


if __name__ == "__main__":
    main()
