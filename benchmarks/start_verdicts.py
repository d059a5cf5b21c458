"""Verdicts of `hlat launch`, `check --on` and `train` on memory before a start, beside a rehearsal, near the limit.

A rehearsal runs the program itself on tensors without memory and is the truth here. Each case is drawn by lot until the
planner's estimate is a share of the device's memory that is given in advance; the shares are spread evenly from 0.6 to
1.6, where verdicts are hard. Models have real widths and few layers, so that a rehearsal takes seconds.

    python benchmarks/start_verdicts.py [NUMBER [SEED]]
"""

import random
import statistics
import sys
import time

from results import Recorder

INSTANCES = ("h100", "h200", "a100-40gb", "l40s", "4xrtx4090", "8xa10", "p5.48xlarge", "trn2.48xlarge")
MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "llama-2-13b", "qwen2.5-7b", "qwen3-0.6b", "llama-3-70b")
NUMBER, SEED = 60, 43
NEAREST, FURTHEST, BESIDE = 0.6, 1.6, 0.05  # shares of the memory, and how far a case may be from its own
TRIES = 2000  # draws for one case


def draw(lot):
    """Draw a recipe and a cluster; None if the rules refuse it."""
    from hlat.config import RecipeError, parse_recipe
    from hlat.hardware import load_catalog, parse_cluster

    cluster = parse_cluster(f"{lot.choice(INSTANCES)}:{lot.choice((1, 1, 2))}", load_catalog())
    tensor, pipeline, context = lot.choice((1, 1, 2, 4, 8)), lot.choice((1, 1, 1, 2, 4)), lot.choice((1, 1, 1, 2))
    micro, length = lot.choice((1, 1, 2, 4, 8, 16)), lot.choice((1024, 2048, 4096, 8192))
    # Rehearsals run the loss in chunks of tokens: more of them only take longer
    if cluster.devices % (tensor * pipeline * context) or micro * length > 16_384:
        return None
    # A rehearsal runs each micro-batch; one alone accumulates nothing, and after four rounds most pipelines repeat
    rounds = lot.choice((1, 2, 3, 5) if pipeline < 4 else (1, 2))
    data = cluster.devices // (tensor * pipeline * context)
    content = {
        "run": {"name": "drawn"},
        "model": {"preset": lot.choice(MODELS), "layers": lot.choice((2, 3, 4))},
        "data": {"path": "none", "sequence_length": length},
        "batch": {"global_batch": micro * data * pipeline * rounds, "micro_batch": micro},
        "memory": {"activation_checkpointing": lot.choice(("none", "none", "selective", "full"))},
        "optimizer": {"kind": lot.choice(("adamw", "adamw", "muon"))},
        "parallel": {"tensor": tensor, "pipeline": pipeline, "context": context, "zero": lot.choice((0, 1, 2, 3))},
        "precision": {"mode": lot.choice(("mixed", "mixed", "bf16-sr", "fp32"))},
        "training": {"steps": 100},
    }
    if pipeline > 1:
        content["parallel"]["schedule"] = lot.choice(("1f1b", "1f1b", "gpipe", "interleaved-1f1b", "zbv"))
    try:
        return parse_recipe(content, world=cluster.devices), cluster
    except RecipeError:
        return None


def case(lot, share, ratios):
    """Draw a recipe of which the estimate is near a share of the memory; add each draw's quick over exact estimate."""
    from hlat.parallel import StepShape
    from hlat.planner.memory import estimated_ranks, pipeline_memory
    from hlat.planner.problem.layouts import recipe_step

    for _ in range(TRIES):
        if (drawn := draw(lot)) is None:
            continue
        recipe, cluster = drawn
        request, candidate = recipe_step(recipe, cluster)
        needed = max(each.total for each in pipeline_memory(request, StepShape.of(recipe, candidate.world)))
        ratios.append(max(estimated_ranks(request, candidate)) / needed)
        if abs(needed / cluster.memory_bytes - share) < BESIDE:
            return drawn
    raise SystemExit(f"no recipe needs {share:.2f} of a device in {TRIES} draws")


def main():
    """Print a row for each recipe, and record false alarms, misses, errors and times."""
    from hlat.hardware import load_catalog
    from hlat.planner import recipe_fit
    from hlat.rehearsal import parse_device, rehearse
    from hlat.runtime.errors import HlatError

    record = Recorder(__file__, "first-hour.md")
    number, seed = [*map(int, sys.argv[1:]), *(NUMBER, SEED)[len(sys.argv) - 1 :]]
    lot, rows, quick = random.Random(seed), [], []
    print("| model, layers | cluster | batch x tokens | layout | estimated GiB | of it | rehearsed | verdicts | s, s |")
    print("|---|---|---|---|---|---|---|---|---|")
    while len(rows) < number:
        share = NEAREST + (FURTHEST - NEAREST) * (len(rows) + 0.5) / number
        recipe, cluster = case(lot, share, quick)
        begin = time.perf_counter()
        fit = recipe_fit(recipe, cluster)
        middle = time.perf_counter()
        try:
            device = parse_device(None, cluster, load_catalog())
            verdict = rehearse(recipe, cluster.devices, device=device, cluster=cluster).verdict
        except HlatError as error:  # what a device cannot do is another refusal
            print(f"drawn again: {str(error).splitlines()[0][:200]}", file=sys.stderr)
            continue
        seconds = middle - begin, time.perf_counter() - middle
        rows.append((fit, verdict, seconds))
        parallel, batch = recipe.parallel, recipe.batch
        pipeline = f"P{parallel.pipeline} {parallel.schedule} " if parallel.pipeline > 1 else ""
        words = {(True, True): "fits", (False, False): "does not", (False, True): "FALSE ALARM", (True, False): "MISS"}
        print(
            f"| {recipe.model.preset}, {recipe.model.layers} | {cluster.name} "
            f"| {batch.global_batch} / {batch.micro_batch} x {recipe.data.sequence_length} "
            f"| T{parallel.tensor} C{parallel.context} {pipeline}Z{parallel.zero} "
            f"{recipe.memory.activation_checkpointing} {recipe.optimizer.kind} {recipe.precision.mode} "
            f"| {fit.needed / 2**30:.2f} | {fit.needed / fit.memory:.2f} "
            f"| {verdict.needed / 2**30:.2f} ({fit.needed / verdict.needed - 1:+.1%}) "
            f"| {words[fit.fits, verdict.fits]} | {seconds[0]:.2f}, {seconds[1]:.1f} |",
            flush=True,
        )
    fitting = sum(verdict.fits for _, verdict, _ in rows)
    alarms = sum(not fit.fits and verdict.fits for fit, verdict, _ in rows)
    misses = sum(fit.fits and not verdict.fits for fit, verdict, _ in rows)
    ratios = [fit.needed / verdict.needed for fit, verdict, _ in rows]
    beyond = sum(abs(ratio - 1) > 0.03 for ratio in ratios)
    estimates = [seconds for _, _, (seconds, _) in rows]
    print(f"\n{number} recipes: {fitting} fit, of which {alarms} are refused (false alarms)")
    print(f"{number - fitting} do not fit, of which {misses} are let through (misses)")
    print(f"estimate / rehearsal {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    print(f"{beyond} beyond 3 %")
    print(f"estimates {statistics.median(estimates):.2f} s, slowest {max(estimates):.2f}; rehearsals", end=" ")
    print(f"{statistics.median(seconds for _, _, (_, seconds) in rows):.0f} s")
    print(f"quick estimate of {len(quick)} draws / exact {min(quick):.2f} to {max(quick):.2f}")
    of = f"of {number} random recipes near the limit before a start, beside their rehearsal (seed {seed})"
    record.add(f"wrong verdicts {of}", "recipes", alarms + misses, note=f"{alarms} false alarms, {misses} misses")
    record.add(f"largest difference of the memory {of}", "%", 100 * max(abs(ratio - 1) for ratio in ratios))
    record.add(f"largest quick estimate over the exact one of {len(quick)} random layouts", "1", max(quick))
    record.write()


if __name__ == "__main__":
    main()
