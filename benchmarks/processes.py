"""Speed of one process on all cores and of several processes, training the quickstart's model on this machine.

Trains the shipped recipe for some steps, alternating, and prints tokens per second (the median of the logged steps
after the first five) and their ratio to one process.

    python benchmarks/processes.py [--rounds 3] [--steps 40] [--nproc 2]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from results import Recorder

LAYOUTS = {
    "data parallel, ZeRO 0": ["parallel.zero=0", "batch.micro_batch={share}"],
    "data parallel, ZeRO 1": ["parallel.zero=1", "batch.micro_batch={share}"],
    "pipeline": ["parallel.pipeline={nproc}", "batch.micro_batch=2"],
}


def train(folder, name, steps, extra):
    """Train once; return the median rate."""
    run_dir = folder / name
    subprocess.run(["rm", "-rf", run_dir / "metrics.jsonl", run_dir / "checkpoints"], check=True)
    fixed = [f"run.dir={run_dir}", f"data.prepared_dir={folder / 'data'}", "tracking.console=none"]
    short = [
        f"training.steps={steps}",
        "training.log_every=5",
        "checkpoint.every_steps=null",
        "schedule.warmup_steps=2",
    ]
    command = [sys.executable, "-m", "hlat", "train", "quickstart", *fixed, *short, "evaluation.every_steps=null"]
    subprocess.run([*command, *extra], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["tokens_per_second"] for line in lines[1:])


def main():
    """Print and record the median rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--nproc", type=int, default=os.cpu_count() or 2)
    options, record = parser.parse_args(), Recorder(__file__, "processes.md")
    from hlat.quickstart.corpus import standard_library
    from hlat.runtime.backend import has_fast_bf16
    from hlat.runtime.distributed import join_run

    mode = "mixed" if has_fast_bf16(join_run().device) else "fp32"  # as the quickstart chooses

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        common = [f"data.sources={standard_library()}", f"precision.mode={mode}"]
        rates = {"one process": []} | {name: [] for name in LAYOUTS}
        for _ in range(options.rounds):
            rates["one process"].append(train(folder, "one", options.steps, common))
            for name, overrides in LAYOUTS.items():
                filled = [text.format(nproc=options.nproc, share=8 // options.nproc) for text in overrides]
                extra = [*common, *filled, "--nproc", str(options.nproc)]
                rates[name].append(train(folder, name.replace(" ", "-").replace(",", ""), options.steps, extra))
        base = statistics.median(rates["one process"])
        print(f"| {mode}, {options.nproc} cores | tokens/s | of one process |\n|---|---|---|")
        for name, found in rates.items():
            print(f"| {name} | {statistics.median(found):,.0f} | {statistics.median(found) / base:.2f} |")
            one = {} if name == "one process" else {"peer": "one process", "peer_values": rates["one process"]}
            record.add(f"training speed of the quickstart's model, {mode}, {name}", "tokens/s", found, **one)
    record.write()


if __name__ == "__main__":
    main()
