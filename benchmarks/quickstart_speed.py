"""Speed and loss of the quickstart's recipe in two checkouts of hlat, by the clock, with the same text and seeds.

    python benchmarks/quickstart_speed.py --before CHECKOUT [--steps N] [--longer M] [--seeds 0 1] [--text FILE]
        [--override a.b=c]

A processor without AVX-512 is imitated by ``ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=
AVX2`` in the environment and ``--override precision.mode=fp32``: torch, oneDNN and MKL keep to AVX2 then, and hlat
takes the kernels of such a processor.

Three runs alternate for each seed: the other checkout and this one train N steps, and this one trains M steps more
within the time that the other needed for N (M is to be chosen so; the table says how long each took). Speed is the
median of the logged tokens/s without the first three lines; the loss is that of the last validation. The text is the
standard library of this Python, or a file that is named.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from hlat.quickstart import standard_library
from results import ROOT, Recorder


def train(checkout: Path, folder: Path, text: list[str], steps: int, seed: int) -> dict[str, float]:
    """Train in a process of its own; return seconds of the command, tokens per second and validation loss."""
    name = f"{checkout.name}-{steps}-{seed}"
    command = [sys.executable, "-m", "hlat", "train", "quickstart", *text, f"run.dir={folder / name}"]
    command += [f"training.steps={steps}", f"training.seed={seed}", f"data.prepared_dir={folder / checkout.name}"]
    begin = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - begin
    rows = [json.loads(line) for file in (folder / name).rglob("metrics.jsonl") for line in file.open()]
    rates = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row][3:]
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    return {"seconds": seconds, "rate": statistics.median(rates), "loss": losses[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout of hlat to compare with")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--longer", type=int, default=240)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--override", action="append", default=[], metavar="FIELD=VALUE", help="of the recipe")
    options = parser.parse_args()
    record, rows = Recorder(__file__, "quickstart.md"), defaultdict(list)
    text = [f"data.path={options.text}"] if options.text else [f"data.sources={json.dumps(standard_library())}"]
    text += options.override
    before, longer = options.before.resolve(), options.steps + options.longer
    sides = {"before": (before, options.steps), "now": (ROOT, options.steps), "now, as long": (ROOT, longer)}
    with tempfile.TemporaryDirectory() as folder:
        for checkout in (before, ROOT):  # prepares the text and builds what is built once
            train(checkout, Path(folder), text, 40, options.seeds[0])
        for seed in options.seeds:
            for side, (checkout, steps) in sides.items():
                row = train(checkout, Path(folder), text, steps, seed)
                rows[side].append(row)
                print(
                    f"seed {seed}, {side}, {steps} steps: {row['rate']:,.0f} tokens/s, "
                    f"validation loss {row['loss']:.4f}, {row['seconds']:.1f} s in all",
                    flush=True,
                )
    for what, unit, field, side in (
        ("training speed of the quickstart", "tokens/s", "rate", "now"),
        (f"validation loss of the quickstart after {options.steps} steps", "1", "loss", "now"),
        (f"validation loss of the quickstart after the time of the other's {options.steps} steps", "1", "loss",
         "now, as long"),
        (f"the quickstart's training command, {options.steps} steps", "s", "seconds", "now"),
    ):  # fmt: skip
        values, others = ([row[field] for row in rows[key]] for key in (side, "before"))
        record.add(what, unit, values, peer=f"hlat in {before.name}", peer_values=others)
    record.write()


if __name__ == "__main__":
    main()
