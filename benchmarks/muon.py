"""Muon beside AdamW: time of the optimizer's step by layout, and quality at the same budget.

    python benchmarks/muon.py steps
    python benchmarks/muon.py shakespeare ../shared/data/text/tinyshakespeare.txt [--seeds 1 2 3]
    python benchmarks/muon.py tokens ../shared/data/text/books.parquet [--steps 600]

``steps`` times the step of a model of 25 million parameters in several layouts, all processes on this machine.
``shakespeare`` trains the recipe tiny-shakespeare (2,000 steps) with both optimizers. Rates are tuned with a seed of
their own, then three other seeds are trained at the best rate of each. ``tokens`` trains a model of 10 million
parameters on a folder or file of books with AdamW at its best rate, and Muon at its best rate for several shorter
budgets, each with a complete schedule. It reports the tokens after which Muon has AdamW's final validation loss,
interpolated between budgets.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1" if "steps" in sys.argv[1:2] else str(os.cpu_count() or 1))
sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of tests/

from hlat.config import load_recipe
from hlat.config.load import parse_recipe
from hlat.training import run
from results import Recorder

TUNING_SEED = 7
GOAL = 1.60  # nats: validation loss of tiny-shakespeare
RATES = {"adamw": (1e-3, 2e-3, 4e-3), "muon": (5e-3, 1e-2, 2e-2)}
LAYOUTS = (
    ("one process", 1, {}),
    ("DP2, ZeRO 0", 2, {"zero": 0}),
    ("DP2, ZeRO 1", 2, {"zero": 1}),
    ("DP2, ZeRO 3", 2, {"zero": 3}),
    ("TP2", 2, {"tensor": 2}),
    ("PP2", 2, {"pipeline": 2}),
    ("TP2 x DP2, ZeRO 1", 4, {"tensor": 2, "zero": 1}),
)
WIDE = {"layers": 4, "hidden_size": 640, "intermediate_size": 1728, "heads": 10, "kv_heads": 10, "vocab_size": 4096}
TEN_MILLION = {
    "layers": 7,
    "hidden_size": 320,
    "intermediate_size": 864,
    "heads": 5,
    "vocab_size": 4096,
    "tie_embeddings": True,
}
BUDGETS = (0.4, 0.5, 0.6, 0.75, 1.0)  # shares of AdamW's steps


def time_steps(options, record):
    """Time the optimizer's step in each layout."""
    from tests.support.distributed.step_times import time_steps as job
    from tests.support.distributed.workers import Pool

    pool = Pool(4)
    try:
        for name, world, parallel in LAYOUTS:
            slowest = {}
            for kind in RATES:
                content = {
                    "model": WIDE,
                    "data": {"path": "none", "sequence_length": 64, "tokenizer": {"train": "char"}},
                    "batch": {"global_batch": 8, "micro_batch": 2},
                    "optimizer": {"kind": kind},
                    "training": {"steps": 10},
                    "precision": {"mode": options.mode},
                    "parallel": parallel,
                }
                ranks = pool.run(world, job, content, options.steps)
                slowest[kind] = [1e3 * max(times) for times in zip(*ranks, strict=True)]
            print(
                f"{name:20s}", {kind: f"{sorted(ms)[len(ms) // 2]:.1f} ms" for kind, ms in slowest.items()}, flush=True
            )
            record.add(
                f"step of Muon, {name}, 25 M parameters, {options.mode}, slowest rank",
                "ms",
                slowest["muon"],
                peer="AdamW of hlat",
                peer_values=slowest["adamw"],
            )
    finally:
        pool.close()


def shakespeare(options, record):
    """Tune both optimizers, then train three seeds with each."""
    losses = {}
    for kind, rates in RATES.items():

        def train(rate, seed, kind=kind):
            with tempfile.TemporaryDirectory() as folder:
                where = [f"data.path={options.text.absolute()}", f"run.dir={folder}", "tracking.console=none"]
                section = [f"optimizer.kind={kind}", f"optimizer.lr={rate}", f"training.seed={seed}"]
                if options.steps:
                    section += [f"training.steps={options.steps}"]
                began = time.monotonic()
                loss = run(load_recipe("tiny-shakespeare", [*where, *section])).validation.loss
            print(f"{kind} lr {rate:g} seed {seed}: {loss:.4f} nats, {time.monotonic() - began:.0f} s", flush=True)
            return loss

        best = min(rates, key=lambda rate: train(rate, TUNING_SEED))
        losses[kind] = best, [train(best, seed) for seed in options.seeds]
    record.add(
        f"validation loss of tiny-shakespeare with Muon, {options.steps or 2000} steps, seeds {options.seeds}",
        "nats",
        losses["muon"][1],
        peer=f"AdamW of hlat, lr {losses['adamw'][0]:g}",
        peer_values=losses["adamw"][1],
        note=f"lr {losses['muon'][0]:g}; rates of both tuned with another seed; goal {GOAL}",
    )


def tokens_to_loss(options, record):
    """Train AdamW for its budget and Muon for shorter ones; interpolate the tokens to the same loss."""
    with tempfile.TemporaryDirectory() as folder:

        def train(kind, rate, steps, seed=TUNING_SEED):
            recipe = {
                "run": {"dir": f"{folder}/{kind}-{rate:g}-{steps}"},
                "model": TEN_MILLION,
                "data": {
                    "path": str(options.text.absolute()),
                    "prepared_dir": f"{folder}/data",
                    "sequence_length": 256,
                    "tokenizer": {"train": "bpe"},
                    "validation": {"fraction": 0.05},
                },
                "batch": {"global_batch": 32, "micro_batch": 32},
                "optimizer": {"kind": kind, "lr": rate},
                "schedule": {"warmup_steps": max(1, steps // 20)},
                "training": {"steps": steps, "seed": seed},
                "checkpoint": {"keep_last": 1, "every_steps": steps},
                "evaluation": {"every_steps": None},
                "tracking": {"console": "none", "tensorboard": False},
                "precision": {"mode": options.mode},
            }
            began = time.monotonic()
            loss = run(parse_recipe(recipe)).validation.loss
            print(f"{kind} lr {rate:g}, {steps} steps: {loss:.4f} nats, {time.monotonic() - began:.0f} s", flush=True)
            return loss

        goal = min(train("adamw", rate, options.steps) for rate in options.rates_adamw)
        middle = round(0.5 * options.steps)
        best = min(options.rates_muon, key=lambda rate: train("muon", rate, middle))
        reached = {}
        for share in BUDGETS:
            reached[share] = train("muon", best, round(share * options.steps))
            if reached[share] <= goal:
                break
        share = interpolate(reached, goal)
        tokens = 32 * 256 * options.steps
        print(f"AdamW: {goal:.4f} nats after {tokens:,} tokens; Muon needs {share:.2f} of them")
        record.add(
            "tokens after which Muon has AdamW's final validation loss, 10 M parameters, books",
            "tokens",
            share * tokens,
            peer="AdamW of hlat",
            peer_values=tokens,
            note=f"loss {goal:.4f}; lr of Muon {best:g}; each budget has a complete schedule; claimed elsewhere: half",
        )


def interpolate(reached, goal):
    """Return the share of the budget at which the loss is the goal: linear in the logarithm of the share.

    The last share if the goal is not reached; the first if it is reached there.
    """
    shares = list(reached)
    for before, after in pairwise(shares):
        if reached[after] <= goal < reached[before]:
            part = (reached[before] - goal) / (reached[before] - reached[after])
            return math.exp(math.log(before) + part * (math.log(after) - math.log(before)))
    return shares[-1] if reached[shares[-1]] > goal else shares[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    steps = commands.add_parser("steps")
    steps.add_argument("--steps", type=int, default=10, help="steps that are timed")
    steps.add_argument("--mode", default="mixed", help="precision mode")
    text = commands.add_parser("shakespeare")
    text.add_argument("text", type=Path)
    text.add_argument("--seeds", type=int, nargs="+", default=[1337, 1, 2])
    text.add_argument("--steps", type=int, help="steps of a run, if not 2,000")
    tokens = commands.add_parser("tokens")
    tokens.add_argument("text", type=Path)
    tokens.add_argument("--steps", type=int, default=600, help="steps of AdamW")
    tokens.add_argument("--mode", default="mixed", help="precision mode")
    tokens.add_argument("--rates-adamw", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    tokens.add_argument("--rates-muon", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3])
    options, record = parser.parse_args(), Recorder(__file__, "optimizers.md")
    {"steps": time_steps, "shakespeare": shakespeare, "tokens": tokens_to_loss}[options.what](options, record)
    record.write(f"muon_{options.what}")


if __name__ == "__main__":
    main()
