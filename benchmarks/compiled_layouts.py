"""Speed of compiled and uncompiled blocks in layouts whose blocks communicate, and the difference of their losses.

Trains a model of 30 M parameters with two processes, alternating between the sides, and prints tokens per second (the
median of the logged steps after the first ten), seconds up to the first step, and the largest difference of a loss.

    python benchmarks/compiled_layouts.py [--rounds 3] [--steps 40] [--mode mixed]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from results import Recorder

LAYOUTS = {
    "TP 2 with sequence parallelism": ["parallel.tensor=2"],
    "TP 2": ["parallel.tensor=2", "parallel.sequence=false"],
    "CP 2": ["parallel.context=2"],
}
WIDTHS = {"hidden_size": 512, "layers": 8, "heads": 8, "kv_heads": 4, "intermediate_size": 1536}
MODEL = [f"model.{name}={value}" for name, value in WIDTHS.items()]
BATCH = ["data.sequence_length=512", "batch.micro_batch=2", "batch.global_batch=4"]
SIDES = {"compiled": "run.compile=blocks", "uncompiled": "run.compile=none"}


def train(folder, steps, extra):
    """Train once; return the median rate, the seconds of the first step and the losses."""
    run_dir = folder / "run"
    subprocess.run(["rm", "-rf", run_dir], check=True)
    fixed = [f"run.dir={run_dir}", f"data.prepared_dir={folder / 'data'}", "tracking.console=none"]
    short = [
        f"training.steps={steps}",
        "training.log_every=1",
        "checkpoint.every_steps=null",
        "schedule.warmup_steps=2",
    ]
    command = [sys.executable, "-m", "hlat", "train", "quickstart", *fixed, *short, "evaluation.every_steps=null"]
    subprocess.run([*command, *extra, "--nproc", "2"], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rate = statistics.median(line["tokens_per_second"] for line in lines[10:])
    return rate, sum(lines[0]["seconds"].values()), [line["loss"] for line in lines]


def main():
    """Print and record the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--mode", default="mixed")
    options, record = parser.parse_args(), Recorder(__file__, "accelerators.md")
    from hlat.quickstart import standard_library

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        common = [f"data.sources={standard_library()}", f"precision.mode={options.mode}", *BATCH, *MODEL]
        print("| layout | tokens/s uncompiled | compiled | ratio | first step, s | largest difference of a loss |")
        print("|---|---|---|---|---|---|")
        for name, layout in LAYOUTS.items():
            found = {side: [] for side in SIDES}
            for _ in range(options.rounds):
                for side, word in SIDES.items():
                    found[side].append(train(folder, options.steps, [*common, *layout, word]))
            rates = {side: [rate for rate, _, _ in runs] for side, runs in found.items()}
            first = {side: statistics.median(seconds for _, seconds, _ in runs) for side, runs in found.items()}
            losses = [runs[0][2] for runs in found.values()]
            difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
            compiled, plain = (statistics.median(rates[side]) for side in SIDES)
            print(
                f"| {name} | {plain:,.0f} | {compiled:,.0f} | {compiled / plain:.2f} | "
                f"{first['uncompiled']:.1f}, {first['compiled']:.1f} | {difference:.1e} |"
            )
            record.add(
                f"training speed of 30 M parameters with compiled blocks, {options.mode}, {name}, 2 processes",
                "tokens/s",
                rates["compiled"],
                peer="uncompiled blocks",
                peer_values=rates["uncompiled"],
            )
            record.add(f"largest difference of a loss by compilation, {options.mode}, {name}", "nats", [difference])
    record.write()


if __name__ == "__main__":
    main()
