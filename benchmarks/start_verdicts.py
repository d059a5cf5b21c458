"""Verdicts on memory before a start (`hlat launch`, `check --on`, `train`) beside a rehearsal, on random recipes.

A rehearsal runs the program itself on tensors without memory and is the truth here. Recipes are drawn by lot: models of
real widths with few layers, so that a rehearsal takes seconds; lengths, micro-batches, policies and layouts.

    python benchmarks/start_verdicts.py [NUMBER [SEED]]
"""

import random
import sys
import time

from results import Recorder

INSTANCES = ("h100", "h200", "a100-40gb", "a100-80gb", "l40s", "rtx4090", "4xrtx4090", "8xa10", "trn1.32xlarge")
MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "llama-2-13b", "qwen2.5-7b", "llama-3-70b")
NUMBER, SEED = 60, 43


def draw(lot):
    """Draw a recipe and a cluster; None if the rules refuse it."""
    from hlat.config import RecipeError, parse_recipe
    from hlat.hardware import load_catalog, parse_cluster

    cluster = parse_cluster(f"{lot.choice(INSTANCES)}:{lot.choice((1, 1, 2))}", load_catalog())
    content = {
        "run": {"name": "drawn"},
        "model": {"preset": lot.choice(MODELS), "layers": lot.choice((2, 4, 6, 8))},
        "data": {"path": "none", "sequence_length": lot.choice((1024, 2048, 4096, 8192))},
        "batch": {"global_batch": 256, "micro_batch": lot.choice((1, 1, 2, 4, 8))},
        "memory": {"activation_checkpointing": lot.choice(("none", "none", "selective", "full"))},
        "optimizer": {"kind": lot.choice(("adamw", "adamw", "muon"))},
        "parallel": {
            "tensor": lot.choice((1, 1, 2, 4, 8)),
            "pipeline": lot.choice((1, 1, 1, 2)),
            "zero": lot.choice((0, 1, 2, 3)),
        },
        "training": {"steps": 100},
    }
    try:
        return parse_recipe(content, world=cluster.devices), cluster
    except RecipeError:
        return None


def main():
    """Print a row for each recipe, and record false alarms, misses, errors and times."""
    from hlat.hardware import load_catalog
    from hlat.planner import recipe_fit
    from hlat.rehearsal import parse_device, rehearse
    from hlat.runtime.errors import HlatError

    record = Recorder(__file__, "first-hour.md")
    number, seed = [*map(int, sys.argv[1:]), *(NUMBER, SEED)[len(sys.argv) - 1 :]]
    lot, rows, tried = random.Random(seed), [], 0
    print(
        "| model, layers | cluster | tokens x micro | layout | estimated GiB | rehearsed | usable | verdicts | s, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    while len(rows) < number and tried < 20 * number:
        tried += 1
        if (drawn := draw(lot)) is None:
            continue
        recipe, cluster = drawn
        begin = time.perf_counter()
        fit = recipe_fit(recipe, cluster)
        middle = time.perf_counter()
        try:
            device = parse_device(None, cluster, load_catalog())
            verdict = rehearse(recipe, cluster.devices, device=device, cluster=cluster).verdict
        except HlatError:  # what a device cannot do is another refusal
            continue
        seconds = middle - begin, time.perf_counter() - middle
        rows.append((fit, verdict, seconds))
        parallel, memory = recipe.parallel, recipe.memory.activation_checkpointing
        words = {(True, True): "fits", (False, False): "does not", (False, True): "FALSE ALARM", (True, False): "MISS"}
        print(
            f"| {recipe.model.preset}, {recipe.model.layers} | {cluster.name} "
            f"| {recipe.data.sequence_length} x {recipe.batch.micro_batch} "
            f"| T{parallel.tensor} P{parallel.pipeline} Z{parallel.zero} {memory} | {fit.needed / 2**30:.2f} "
            f"| {verdict.needed / 2**30:.2f} | {verdict.usable / 2**30:.1f} | {words[fit.fits, verdict.fits]} "
            f"| {seconds[0]:.2f}, {seconds[1]:.1f} |",
            flush=True,
        )
    alarms = sum(not fit.fits and verdict.fits for fit, verdict, _ in rows)
    misses = sum(fit.fits and not verdict.fits for fit, verdict, _ in rows)
    worst = max(abs(fit.needed / verdict.needed - 1) for fit, verdict, _ in rows)
    fitting = sum(verdict.fits for _, verdict, _ in rows)
    slowest = max(seconds for _, _, (seconds, _) in rows)
    print(f"\n{len(rows)} recipes, of which {fitting} fit; false alarms {alarms}, misses {misses}")
    print(f"largest difference {worst:.1%}; slowest estimate {slowest:.2f} s")
    print(f"slowest rehearsal {max(seconds for _, _, (_, seconds) in rows):.0f} s")
    of = f"of {len(rows)} random recipes before a start, beside their rehearsal (seed {seed})"
    record.add(f"wrong verdicts {of}", "recipes", alarms + misses, note=f"{alarms} false alarms, {misses} misses")
    record.add(f"largest difference of the memory {of}", "%", 100 * worst)
    record.write()


if __name__ == "__main__":
    main()
