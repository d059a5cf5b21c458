"""Training step of hlat's layouts on several processes of this machine, beside DDP and FSDP2 of plain torch.

    python benchmarks/processes.py [--rounds 3] [--steps 8] [--nproc 2] [--fp32]

    each round, each side: torchrun -> processes -> some steps on random tokens -> seconds of a step, processor seconds

Sides alternate, and do the same work: the same shape of model, the same global batch, clipping, fused AdamW, one thread
per process (one process: all cores). hlat's step is that of its training loop without data, checkpoints and metrics;
the peers are benchmarks/stock_training.py. A step is by the clock of rank 0, the median of its steps after the first
two; processor seconds are those of all processes.
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

from results import Recorder

SHAPE = {"vocab_size": 4096, "hidden_size": 384, "layers": 6, "heads": 6, "kv_heads": 2, "intermediate_size": 1024}
LENGTH, ROWS, WARM = 256, 8, 2
ONE = "one process"
PEERS = {
    "torch, one process": "one",
    "torch, DDP": "ddp",
    "torch, FSDP2": "fsdp",
    "torch, FSDP2, reshard": "fsdp, reshard",
}
LAYOUTS: dict[str, dict[str, int]] = {
    "hlat, one process": {},
    "hlat, ZeRO 0": {"zero": 0},
    "hlat, ZeRO 1": {"zero": 1},
    "hlat, ZeRO 3": {"zero": 3},
    "hlat, TP": {"tensor": 0, "zero": 0},
    "hlat, PP": {"pipeline": 0, "zero": 0},
}
"""Values of the recipe's section ``parallel`` by side; 0 stands for the number of processes, except for zero."""
COMPARED = {
    "hlat, one process": "torch, one process",
    "hlat, ZeRO 0": "torch, DDP",
    "hlat, ZeRO 1": "torch, FSDP2",
    "hlat, ZeRO 3": "torch, FSDP2, reshard",
    "hlat, TP": "torch, FSDP2",
    "hlat, PP": "torch, FSDP2",
}


def hlat_step(side, world, bf16, folder):
    """Build hlat's model in a layout; return the step of this process, and the rows that it computes."""
    from hlat.config import Recipe
    from hlat.data.samples.training_data import Batch
    from hlat.optim import build_optimizer
    from hlat.parallel import build_parallel
    from hlat.runtime.distributed.join import join_run
    from hlat.training import accumulate_gradients, update

    parallel = {name: value if name == "zero" else world for name, value in LAYOUTS[side].items()}
    shares = 1 if {"tensor", "pipeline"} & parallel.keys() else world
    micro = 2 if "pipeline" in parallel else ROWS // shares
    recipe = Recipe.model_validate(
        {
            "run": {"name": "processes", "dir": folder, "device": "cpu"},
            "model": SHAPE,
            "data": {"path": "none.txt", "sequence_length": LENGTH},
            "batch": {"global_batch": ROWS, "micro_batch": micro},
            "optimizer": {"lr": 1e-3},
            "training": {"steps": 1000},
            "parallel": parallel,
            "precision": {"mode": "mixed" if bf16 else "fp32"},
        }
    )
    model = build_parallel(recipe, join_run("cpu"), 1)
    mode, precision = recipe.precision.mode, recipe.precision
    optimizer = build_optimizer(
        model.local_parameters, recipe.optimizer, mode, 1, model.matrices, precision.in_hardware
    )
    rows, done = model.rows(ROWS), 0

    def step(inputs, labels):
        nonlocal done
        done += 1
        batch = Batch(inputs, labels, None, 0)
        return update(model, optimizer, recipe, done, accumulate_gradients(model, batch)).loss

    return step, rows


def work(options):
    """One process of a side: print seconds of a step, processor seconds of a step, and the loss, of each process."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    bf16 = not options.fp32
    if options.side in PEERS:
        import torch

        from stock_training import make_step

        if world > 1:
            torch.distributed.init_process_group("gloo")
        step = make_step(SHAPE, LENGTH, PEERS[options.side], world, bf16)
        share = ROWS // world
        rows = range(rank * share, rank * share + share)
    else:
        step, rows = hlat_step(options.side, world, bf16, options.folder)
        import torch
    torch.set_num_threads((os.cpu_count() or 1) if world == 1 else 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, SHAPE["vocab_size"], (ROWS, LENGTH + 1), generator=generator)[rows.start : rows.stop]
    clock, losses = [], []
    for number in range(WARM + options.steps):
        if number == WARM:
            computed = time.process_time()
        begin = time.perf_counter()
        losses.append(float(step(tokens[:, :-1], tokens[:, 1:])))
        clock.append(time.perf_counter() - begin)
    spent = (time.process_time() - computed) / options.steps
    found = {"rank": rank, "clock": statistics.median(clock[WARM:]), "processor": spent, "loss": losses[-1]}
    (Path(options.folder) / f"{rank}.json").write_text(json.dumps(found))
    if world > 1:
        torch.distributed.barrier()
    os._exit(0)  # the process groups of both sides end with the processes


def run(side, options):
    """Start the processes of a side; return the seconds of a step by the clock, and of all processors."""
    nproc = 1 if side.endswith(ONE) else options.nproc
    with tempfile.TemporaryDirectory() as folder:
        worker = [__file__, "--worker", side, "--folder", folder, "--steps", str(options.steps)]
        worker += ["--fp32"] if options.fp32 else []
        environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count() if nproc == 1 else 1)}
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)] if nproc > 1 else []
        subprocess.run([sys.executable, *launcher, *worker], check=True, env=environment, stderr=subprocess.DEVNULL)
        found = [json.loads(file.read_text()) for file in Path(folder).glob("[0-9]*.json")]
    first = next(each for each in found if each["rank"] == 0)
    return first["clock"], sum(each["processor"] for each in found)


def main():
    """Alternate the sides; print and record the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--fp32", action="store_true", help="compute in fp32 instead of bf16 with fp32 weights")
    parser.add_argument("--sides", default=None, help="some of the sides, separated by semicolons")
    parser.add_argument("--worker", dest="side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        work(options)
    record = Recorder(__file__, "processes.md")
    sides = options.sides.split(";") if options.sides else [*PEERS, *LAYOUTS]
    clock, processor = defaultdict(list), defaultdict(list)
    for _ in range(options.rounds):
        for side in sides:
            spent, computed = run(side, options)
            clock[side].append(spent)
            processor[side].append(computed)
            print(f"  {side}: {spent:.3f} s by the clock, {computed:.3f} s of processors", flush=True)
    mode = "fp32" if options.fp32 else "bf16 over fp32 weights"
    print(f"| {mode}, {options.nproc} processes | clock, s | processors, s | peer | clock, times | processors, times |")
    print("|---|---:|---:|---|---:|---:|")
    for side in sides:
        peer = COMPARED.get(side)
        cells = [side, *(f"{statistics.median(each[side]):.3f}" for each in (clock, processor))]
        if peer in clock:
            cells += [
                peer,
                *(
                    f"{statistics.median(each[peer]) / statistics.median(each[side]):.2f}"
                    for each in (clock, processor)
                ),
            ]
        print("| " + " | ".join(cells) + " |")
        for values, kind in ((clock, "by the clock"), (processor, "processor time of all processes")):
            one = {"peer": peer, "peer_values": values[peer]} if peer in values else {}
            record.add(f"seconds of a step, {side}, {mode}, {kind}", "s", values[side], **one)
    record.write("processes" + ("-fp32" if options.fp32 else ""))


if __name__ == "__main__":
    main()
