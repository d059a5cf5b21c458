"""Planned peak memory of ranks in random layouts, compared with their rehearsal.

seed -> model shape, layout, schedule, precision, activation checkpointing -> plan of first, middle and last stage
    -> the same ranks rehearsed on tensors without memory -> error of the plan

python benchmarks/random_layouts.py [--seed 11] [--count 30]
"""

import argparse
import random
import statistics
import tempfile
from pathlib import Path

import yaml

from results import Recorder

SHAPES = (
    {"vocab_size": 32_000, "layers": 8, "hidden_size": 1024, "intermediate_size": 2816, "heads": 16, "kv_heads": 4},
    {"vocab_size": 128_256, "layers": 8, "hidden_size": 4096, "intermediate_size": 14_336, "heads": 32, "kv_heads": 8},
    {"vocab_size": 32_000, "layers": 8, "hidden_size": 4096, "intermediate_size": 11_008, "heads": 32, "kv_heads": 32},
    {"vocab_size": 32_000, "layers": 16, "hidden_size": 8192, "intermediate_size": 28_672, "heads": 64, "kv_heads": 8},
)
SCHEDULES = ("1f1b", "gpipe", "interleaved,vpp=2", "interleaved-zero-bubble", "zbv")


def draw(rng):
    """Draw a shape, a sequence length, a layout as text, precision, world, micro-batches per pipeline rank."""
    tensor, pipeline = rng.choice((1, 1, 2, 4, 8)), rng.choice((1, 1, 2, 4))
    context, data = rng.choice((1, 1, 1, 2)), rng.choice((1, 2, 4, 8))
    layout = f"tp={tensor},pp={pipeline},cp={context},zero={rng.choice((0, 1, 2, 3)) if data * context > 1 else 0}"
    layout += f",mbs={rng.choice((1, 2, 4))},ckpt={rng.choice(('none', 'selective', 'full'))}"
    if pipeline > 1:
        layout += f",schedule={rng.choice(SCHEDULES)}"
    if tensor > 1:
        layout += rng.choice((",gather=never", ""))
    mode = rng.choice(("mixed", "mixed", "fp32", "bf16-sr"))
    world = tensor * pipeline * context * data
    return rng.choice(SHAPES), rng.choice((2048, 4096, 8192)), layout, mode, world, rng.choice((1, 2))


def recipe_of(shape, sequence, parallel, batch, micro_batch, mode, policy):
    """The content of a recipe."""
    return {
        "model": shape | {"max_sequence_length": sequence},
        "data": {"path": "none", "sequence_length": sequence, "tokenizer": {"train": "char"}},
        "batch": {"global_batch": batch, "micro_batch": micro_batch},
        "training": {"steps": 10, "seed": 3},
        "parallel": parallel,
        "precision": {"mode": mode},
        "memory": {"activation_checkpointing": policy},
    }


def compare(catalog, drawn):
    """Errors of the plan by stage, and of the fast estimate; None if the layout is not possible."""
    from hlat.config.load import parse_recipe
    from hlat.hardware import parse_cluster
    from hlat.planner.memory import estimate_rank_memory, rank_memory
    from hlat.planner.problem.layouts import parse_layout
    from hlat.planner.problem.request import PlanRequest
    from hlat.rehearsal import rehearse
    from hlat.runtime.errors import PlanError

    shape, sequence, layout, mode, world, per_rank = drawn
    model = parse_recipe(recipe_of(shape, sequence, {}, 8, 1, mode, "none")).model
    cluster = parse_cluster(f"here:{world}", catalog)
    try:
        candidate = parse_layout(layout, PlanRequest("model", model, cluster, 10**6, sequence, 8 * world, mode))
    except PlanError:
        return None
    batch = per_rank * candidate.pipeline * candidate.data * candidate.micro_batch
    question = PlanRequest("model", model, cluster, 10**6, sequence, batch, mode)
    parallel = candidate.parallel.model_dump(exclude_none=True)
    content = recipe_of(shape, sequence, parallel, batch, candidate.micro_batch, mode, candidate.recompute)
    stages = sorted({0, candidate.pipeline // 2, candidate.pipeline - 1})
    ranks = [stage * (world // candidate.pipeline) for stage in stages]
    reports = rehearse(parse_recipe(content, world=world), world, ranks).ranks

    def error(memory, report):
        return (memory.total - memory.runtime - memory.slack) / report.peak_bytes - 1

    return {
        stage: (
            error(rank_memory(question, candidate, stage), report),
            error(estimate_rank_memory(question, candidate, stage), report),
        )
        for stage, report in zip(stages, reports, strict=True)
    }


def main():
    """Print a row per rehearsed rank, and record the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--count", type=int, default=30, help="layouts to draw; impossible ones are drawn again")
    options = parser.parse_args()
    record = Recorder(__file__, "memory.md")
    from hlat.hardware import MeasuredMachine, load_catalog

    rng, errors, possible = random.Random(options.seed), [], 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "own.yaml"
        machine = MeasuredMachine("here", 1, {"bfloat16": 1e11, "float32": 1e11}, 24 << 30, 1e10, 1e9)
        file.write_text(yaml.safe_dump(machine.catalog("here")), encoding="utf-8")
        catalog = load_catalog(str(file))
        while possible < options.count:
            drawn = draw(rng)
            found = compare(catalog, drawn)
            if found is None:
                continue
            possible += 1
            for stage, (planned, estimated) in found.items():
                errors.append((abs(planned), abs(estimated)))
                shape, sequence, layout, mode, world, _ = drawn
                name = f"{shape['hidden_size']} wide, {sequence}, {world} x {layout}, {mode}"
                print(f"{name}, stage {stage}: plan {planned:+.2%}, fast estimate {estimated:+.2%}", flush=True)
    plans = [100 * plan for plan, _ in errors]
    beyond = sum(plan > 3 for plan in plans)
    what = f"error of the planned peak memory of {len(errors)} ranks in {options.count} random layouts"
    record.add(f"{what}: mean", "%", statistics.mean(plans), peer="rehearsed", peer_values=0, note="seed of its own")
    record.add(f"{what}: largest", "%", max(plans), peer="rehearsed", peer_values=0, note=f"{beyond} beyond 3 %")
    record.write()
    print(f"{len(errors)} ranks: mean {statistics.mean(plans):.2f} %, largest {max(plans):.2f} %, {beyond} beyond 3 %")


if __name__ == "__main__":
    main()
