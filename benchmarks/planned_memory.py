"""Plan of a layout compared with its rehearsal and its real processes: bytes at the peak, bytes sent, FLOPs.

The layouts are those of tests/distributed/memory/test_planned.py, which requires errors below 3 % and 8 %; this prints
the errors.

    python benchmarks/planned_memory.py
"""

import os
import sys
import tempfile
from pathlib import Path

from results import Recorder

os.environ.setdefault("OMP_NUM_THREADS", "1")  # eight processes on a few cores
sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of tests/


def main():
    """Print a row for each pipeline rank of each layout, and record the largest errors."""
    record = Recorder(__file__, "planner.md")
    import yaml

    from hlat.hardware import MeasuredMachine
    from hlat.planner.cost.step_counts import exchanged_bytes, executed_flops
    from hlat.planner.memory import rank_memory
    from hlat.rehearsal import rehearse
    from tests.distributed.memory.test_planned import LAYOUTS, asked
    from tests.support.distributed.rehearsed import measure
    from tests.support.distributed.workers import Pool

    machine = MeasuredMachine("here", 1, {"bfloat16": 1e11, "float32": 1e11}, 24 << 30, 1e10, 1e9)
    print("| processes, layout, precision | rank | planned, MiB | rehearsed | measured | sent, MiB | GFLOP |")
    print("|---|---|---|---|---|---|---|")
    pool, worst = Pool(8), [0.0, 0.0]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "own.yaml"
        file.write_text(yaml.safe_dump(machine.catalog("here")), encoding="utf-8")
        for world, layout, mode in LAYOUTS:
            content, recipe, question, candidate = asked(str(file), world, layout, mode, {})
            measured = pool.run(world, measure, content)
            first = [stage * (world // candidate.pipeline) for stage in range(candidate.pipeline)]
            for stage, report in enumerate(rehearse(recipe, world, first).ranks):
                planned = rank_memory(question, candidate, stage).total
                ratios = [planned / report.peak_bytes - 1, planned / measured[report.rank].peak - 1]
                worst = [max(a, abs(b)) for a, b in zip(worst, ratios, strict=True)]
                sent = sum(exchanged_bytes(question, candidate, stage).values())
                flops = executed_flops(question, candidate, stage)
                assert flops == report.flops == measured[report.rank].flops
                print(
                    f"| {world}, {layout}, {mode} | {stage} | {planned / 2**20:.1f} | {ratios[0]:+.1%} "
                    f"| {ratios[1]:+.1%} | {sent / 2**20:.1f} | {flops / 1e9:.2f} |"
                )
    pool.close()
    print(f"\nworst: {worst[0]:.1%} of rehearsed, {worst[1]:.1%} of measured")
    for what, error, goal in (("rehearsed", worst[0], 3), ("measured in real processes", worst[1], 8)):
        claim = f"largest error of the planned peak memory of a rank in {len(LAYOUTS)} layouts"
        record.add(claim, "%", 100 * error, peer=f"peak {what}", peer_values=0, note=f"goal {goal} %")
    record.write()


if __name__ == "__main__":
    main()
