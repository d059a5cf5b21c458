"""The best learning rate of a small model, on a wider and a deeper one: with ``optimizer.transfer`` and without.

    python benchmarks/rate_transfer.py ../shared/data/text/tinyshakespeare.txt [--rule mup] [--kind adamw] [--steps 200]

The base has width 64 and 2 layers. Rule mup compares it with width 256, completep with 8 layers; both larger models are
also trained without transfer. A curve is the validation loss over rates in steps of the square root of 2, the mean of
three seeds. Its first rates are found with one seed in steps of 2; it grows until its best rate has neighbours on both
sides. The optimum is the vertex of the parabola in the logarithm of the rate through these three points.
"""

import argparse
import math
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hlat.config.load import parse_recipe
from hlat.training import run
from results import Recorder

WIDTH, LAYERS, HEAD = 64, 2, 32  # of the base; heads stay as wide
LARGER = {"mup": (256, 2), "completep": (64, 8)}
BASES = {"mup": {"base_hidden_size": WIDTH}, "completep": {"base_hidden_size": WIDTH, "base_layers": LAYERS}}
SEEDS = (1, 2, 3)
GOAL = 1.4  # largest factor between two optima that counts as a transfer


def train(options, folder, size, transfer, rate, seed):
    """Train one run; return its validation loss in nats."""
    width, layers = size
    recipe = {
        "run": {"dir": f"{folder}/run-{time.monotonic_ns()}"},
        "model": {
            "vocab_size": 65,
            "layers": layers,
            "hidden_size": width,
            "intermediate_size": width * 11 // 4,
            "heads": width // HEAD,
            "init_std": 0.08,
        },
        "data": {
            "path": str(options.text.absolute()),
            "prepared_dir": f"{folder}/data",
            "sequence_length": 128,
            "tokenizer": {"train": "char"},
            "validation": {"fraction": 0.1, "by": "tail"},
        },
        "batch": {"global_batch": 8, "micro_batch": 8},
        "optimizer": {"kind": options.kind, "lr": rate, **transfer},
        "schedule": {"warmup_steps": options.steps // 10},
        "training": {"steps": options.steps, "seed": seed},
        "checkpoint": {"keep_last": 1, "every_steps": options.steps, "background": False},
        "evaluation": {"every_steps": None, "sequences": 128},
        "tracking": {"console": "none", "tensorboard": False},
        "precision": {"mode": "fp32"},
    }
    return run(parse_recipe(recipe)).validation.loss


def curve(train_at, start):
    """Mean loss by half-steps of the rate (rate = 2^(step / 2)), with the losses of each seed."""
    tried = {}
    step = round(2 * math.log2(start))

    def first(step):
        if step not in tried:
            tried[step] = train_at(2 ** (step / 2), SEEDS[0])
        return tried[step]

    while (better := min((step - 2, step, step + 2), key=first)) != step:
        step = better
    found = {}
    while True:
        for each in (step - 1, step, step + 1):
            if each not in found:
                rate = 2 ** (each / 2)
                found[each] = [first(each), *(train_at(rate, seed) for seed in SEEDS[1:])]
        best = min(found, key=lambda each: statistics.mean(found[each]))
        if {best - 1, best + 1} <= found.keys():
            return found
        step = best


def optimum(losses):
    """The rate at the vertex of the parabola through the best point and its neighbours; the best rate at an end."""
    best = min(losses, key=losses.get)
    if not {best - 1, best + 1} <= losses.keys():
        return 2 ** (best / 2)
    below, middle, above = (losses[best + shift] for shift in (-1, 0, 1))
    bend = below - 2 * middle + above
    return 2 ** ((best + (0.5 * (below - above) / bend if bend else 0.0)) / 2)


def measure(options, folder, name, size, transfer, start):
    """Measure a curve, print it, and return the optima: of the mean over the seeds, and of each."""

    def train_at(rate, seed):
        began = time.monotonic()
        loss = train(options, folder, size, transfer, rate, seed)
        print(f"{name}, lr {rate:.3g}, seed {seed}: {loss:.4f} nats, {time.monotonic() - began:.0f} s", flush=True)
        return loss

    found = curve(train_at, start)
    for step, losses in sorted(found.items()):
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        print(f"  {name:24} lr {2 ** (step / 2):8.4g}  {statistics.mean(losses):.4f}  ({each})", flush=True)
    mean = optimum({step: statistics.mean(losses) for step, losses in found.items()})
    return mean, [optimum({step: losses[i] for step, losses in found.items()}) for i in range(len(SEEDS))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--rule", choices=LARGER, default="mup")
    parser.add_argument("--kind", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--start", type=float, default=2**-6.5, help="rate at which the search of the base begins")
    options, record = parser.parse_args(), Recorder(__file__, "transfer.md")
    larger, rule = LARGER[options.rule], {"transfer": options.rule, **BASES[options.rule]}
    with tempfile.TemporaryDirectory() as folder:
        optima = {"base": measure(options, folder, "base", (WIDTH, LAYERS), {}, options.start)}
        base = optima["base"][0]
        # Without transfer the best rate is expected to fall as one over the width.
        for name, transfer, start in ((options.rule, rule, base), ("none", {}, base * WIDTH / larger[0])):
            optima[name] = measure(options, folder, name, larger, transfer, start)
    print(f"\n{'curve':12} {'optimum':>9} {'of the base':>12}   of each seed")
    for name, (mean, seeds) in optima.items():
        each = ", ".join(f"{rate:.3g}" for rate in seeds)
        print(f"{name:12} {mean:9.4g} {mean / base:12.2f}   {each}")
        if name != "base":
            factor = max(mean / base, base / mean)
            where = f"width {larger[0]}, {larger[1]} layers, {options.kind}, {options.steps} steps"
            record.add(
                f"factor between the best rates of the base (width {WIDTH}, {LAYERS} layers) and {where}: {name}",
                "1",
                factor,
                note=f"rates {base:.3g} and {mean:.3g}; of each seed {each}; goal: {GOAL} with transfer, more without",
            )
    suffix = "" if (options.rule, options.kind) == ("mup", "adamw") else f"_{options.rule}_{options.kind}"
    record.write(f"rate_transfer{suffix}")


if __name__ == "__main__":
    main()
