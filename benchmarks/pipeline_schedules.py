"""Speed of the pipeline schedules: steps of real processes, alternating, compared with the planner's simulation.

A model is trained in a pipeline of two processes, one thread each, in all schedules that hlat offers, one step of each
in turn. The simulation uses the seconds of passes measured in the same steps: forward, backward, and, where a schedule
splits the backward pass, the gradients of inputs and the gradients of weights.

    python benchmarks/pipeline_schedules.py [--micro-batches 4 8] [--rounds 9]
"""

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

from results import Recorder

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes on two cores
sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of tests/

SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved-1f1b": 2, "interleaved-zero-bubble": 2, "zbv": 2}
LAYERS, SEQUENCE, MICRO_BATCH = 8, 256, 2


def content(schedule, micro_batches):
    parallel = {"pipeline": 2, "schedule": schedule} if schedule else {}
    return {
        "model": {
            "layers": LAYERS, "hidden_size": 512, "intermediate_size": 1536, "heads": 8, "kv_heads": 8,
            "vocab_size": 512, "max_sequence_length": SEQUENCE,
        },
        "data": {"path": "none", "sequence_length": SEQUENCE, "tokenizer": {"train": "char"}},
        "batch": {"global_batch": MICRO_BATCH * micro_batches, "micro_batch": MICRO_BATCH},
        "training": {"steps": 10, "seed": 3},
        "precision": {"mode": "fp32"},
        "parallel": parallel,
        "run": {"compile": "none"},
    }  # fmt: skip


def timed(stage_class, seconds):
    """Make a stage append the seconds of its passes to lists by stage and kind."""

    def wrapped(name, kind_of):
        inner = getattr(stage_class, name)

        def method(self, *args, **kwargs):
            begin = time.perf_counter()
            result = inner(self, *args, **kwargs)
            seconds[self.stage_index, kind_of(args, kwargs)].append(time.perf_counter() - begin)
            return result

        setattr(stage_class, name, method)

    def backward_kind(args, kwargs):
        full = kwargs.get("full_backward", args[2] if len(args) > 2 else True)
        return "backward" if full else "input"

    wrapped("forward_one_chunk", lambda args, kwargs: "forward")
    wrapped("backward_one_chunk", backward_kind)
    wrapped("backward_weight_one_chunk", lambda args, kwargs: "weight")


def steps(runtime, micro_batches, rounds):
    """Run on a rank: by schedule, the seconds of its steps, and the median of its passes by stage and kind."""
    import torch.distributed as dist

    import hlat.parallel.pipeline_parallel
    from hlat.config.load import parse_recipe
    from hlat.parallel import build_parallel
    from hlat.training import accumulate_gradients
    from tests.support.distributed.rehearsed import _batch

    passes = defaultdict(list)
    timed(hlat.parallel.pipeline_parallel.ReportingStage, passes)
    models = {}
    for schedule in SCHEDULES:
        recipe = parse_recipe(content(schedule, micro_batches), world=runtime.world)
        models[schedule] = (build_parallel(recipe, runtime, seed=3), recipe)
    seconds, medians = defaultdict(list), defaultdict(lambda: defaultdict(list))
    for number in range(rounds + 1):
        for schedule, (model, recipe) in models.items():
            batch = _batch(model, recipe, number + 1)
            passes.clear()
            dist.barrier()
            begin = time.perf_counter()
            accumulate_gradients(model, batch)
            dist.barrier()
            if number:
                seconds[schedule].append(time.perf_counter() - begin)
                for key, values in passes.items():
                    medians[schedule][key].append(statistics.median(values))
    found = {
        name: {key: statistics.median(values) for key, values in by_pass.items()} for name, by_pass in medians.items()
    }
    return dict(seconds), found


def main():
    """Print and record a table for each number of micro-batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    from hlat.planner.cost.step_time import StageTimes, simulate_pipeline
    from tests.support.distributed.workers import Pool

    record, pool = Recorder(__file__, "pipelines.md"), Pool(2)
    try:
        for count in options.micro_batches:
            ranks = pool.run(2, steps, count, options.rounds)
            print(f"\n{count} micro-batches, two ranks, {options.rounds} rounds")
            print(
                "| schedule | step, ms | of 1f1b | simulated | of 1f1b | forward | backward | by inputs | by weights |"
            )
            print("|---|---|---|---|---|---|---|---|---|")
            measured = {name: statistics.median(ranks[0][0][name]) for name in SCHEDULES}
            simulated = {}
            for name, each in SCHEDULES.items():
                times = {
                    kind: [ranks[0][1][name].get((stage, kind)) or ranks[1][1][name].get((stage, kind), 0.0)
                           for stage in range(2 * each)]
                    for kind in ("forward", "backward", "input", "weight")
                }  # fmt: skip
                backward = [
                    sum(parts) for parts in zip(times["backward"], times["input"], times["weight"], strict=True)
                ]
                passes = StageTimes(times["forward"], backward, times["weight"])
                simulated[name] = simulate_pipeline(name, 2, count, passes).seconds
                step, ahead = 1e3 * measured[name], 1e3 * simulated[name]
                cells = [
                    f"{step:.0f}", f"{measured[name] / measured['1f1b']:.3f}",
                    f"{ahead:.0f}", f"{simulated[name] / simulated['1f1b']:.3f}",
                    *(f"{1e3 * sum(values):.1f}" for values in times.values()),
                ]  # fmt: skip
                print(f"| {name} | {' | '.join(cells)} |")
                rounds = [step / base for step, base in zip(ranks[0][0][name], ranks[0][0]["1f1b"], strict=True)]
                claim = f"step of {name} relative to 1f1b, {count} micro-batches, 2 processes"
                ratio = simulated[name] / simulated["1f1b"]
                if name != "1f1b":
                    record.add(claim, "1", rounds, peer="planner, simulated", peer_values=ratio)
        record.write()
    finally:
        pool.close()


if __name__ == "__main__":
    main()
