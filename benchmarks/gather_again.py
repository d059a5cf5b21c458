"""Gathered inputs kept or gathered again: bytes per layer, counted and measured, and seconds of a step.

Two processes with tensor and sequence parallelism on this machine; eager blocks. Steps of both settings alternate.

    python benchmarks/gather_again.py [--width 512] [--sequence 512] [--turns 9]
"""

import argparse
import math
import os
import statistics
import sys
import time
from pathlib import Path

from results import Recorder

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of tests/

RANKS = 2
LAYERS = 4
CHOICES = ("never", "always")


def content_of(width, sequence, gather_again):
    """The recipe of a small model, tensor parallel over all ranks."""
    return {
        "model": {
            "vocab_size": 1024,
            "layers": LAYERS,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "heads": width // 64,
            "kv_heads": width // 64,
            "max_sequence_length": sequence,
        },
        "data": {"path": "none", "sequence_length": sequence, "tokenizer": {"train": "char"}},
        "batch": {"global_batch": 2, "micro_batch": 1},  # one of ``batch_of``'s sequences has no labels
        "training": {"steps": 10, "seed": 3},
        "precision": {"mode": "fp32"},
        "parallel": {"tensor": RANKS, "gather_again": gather_again},
    }


def measure(runtime, contents, turns):
    """Bytes kept by a forward pass, counted bytes, and seconds of each turn, for each recipe; a job of the pool."""
    import torch

    from hlat.activation_checkpointing import plan_activations
    from hlat.config.load import parse_recipe
    from hlat.parallel import build_parallel
    from hlat.training import accumulate_gradients
    from tests.support.distributed.jobs import batch_of
    from tests.support.storages import Allocated

    recipes = [parse_recipe(content, world=runtime.world) for content in contents]
    models = [build_parallel(recipe, runtime, recipe.training.seed) for recipe in recipes]
    batches = [batch_of(model, recipe, 1) for model, recipe in zip(models, recipes, strict=True)]
    bytes_, counted, seconds, losses = [], [], [[] for _ in recipes], []
    for model, recipe, batch in zip(models, recipes, batches, strict=True):
        losses.append(float(accumulate_gradients(model, batch).detach()))
        assert math.isfinite(losses[-1]), "products of NaN are no measure of time"
        (stage,) = model.stages
        ids = torch.zeros((1, recipe.data.sequence_length), dtype=torch.int64)
        with Allocated() as allocated:
            loss = stage(ids, ids)
        time.sleep(0.1)  # until gloo's thread frees messages
        tables = [table for rope in stage.ropes.values() for table in rope.tables(((0, 1),), ids.device)]
        bytes_.append(allocated.alive([loss, ids, *tables, *stage.parameters()]))
        loss.backward()
        counted.append(plan_activations(recipe, stage.shard, runtime.world, 0, "cpu").saved)
    for _ in range(turns):
        for index, (model, batch) in enumerate(zip(models, batches, strict=True)):
            begin = time.perf_counter()
            accumulate_gradients(model, batch)
            seconds[index].append(time.perf_counter() - begin)
    return bytes_, counted, seconds, losses


def main():
    """Print and record the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    from tests.support.distributed.workers import Pool

    record, pool = Recorder(__file__, "memory.md"), Pool(RANKS)
    try:
        contents = [content_of(options.width, options.sequence, choice) for choice in CHOICES]
        bytes_, counted, seconds, losses = pool.run(RANKS, measure, contents, options.turns)[0]
    finally:
        pool.close()
    print("| gather_again | bytes kept by a forward pass | counted | seconds, median | loss |\n|---|---|---|---|---|")
    for row in zip(CHOICES, bytes_, counted, map(statistics.median, seconds), losses, strict=True):
        print("| {} | {:,} | {:,} | {:.4f} | {!r} |".format(*row))
    sizes = f"width {options.width}, {options.sequence} tokens, {LAYERS} layers, {RANKS} tensor ranks, fp32"
    for choice, kept, formula in zip(CHOICES, bytes_, counted, strict=True):
        claim = f"bytes kept by a forward pass with gather_again {choice}, {sizes}"
        record.add(claim, "bytes", kept, peer="the formula", peer_values=formula)
    ratios = [again / keeping for keeping, again in zip(*seconds, strict=True)]
    print(f"time with inputs gathered again, relative to kept: {statistics.median(ratios):.3f}")
    record.add(f"seconds of forward and backward, gathered again relative to kept, {sizes}", "1", ratios)
    record.write()


if __name__ == "__main__":
    main()
