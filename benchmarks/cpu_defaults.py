"""Speed of a CPU process by its settings: waiting threads, kept memory, compiled blocks, pointwise kernels.

Each side is a process that trains one model with its own settings. All of them stay alive and alternate every few
steps, so that a slow minute of the machine affects all. The median of the turns is reported, with its spread, relative
to the first side. ``--busy N`` starts N programs that use the processor all the time, as neighbours inside this
machine. Time that the host of a virtual machine gives to others (steal) is read from /proc/stat and reported.

    python benchmarks/cpu_defaults.py [--model reference] [--mode mixed] [--busy 0] [--rounds 7] [--seconds 2] \
        --sides spin=300000 spin=20000 spin=20000,keep compiled
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from results import Recorder

SHAPE = ("vocab_size", "layers", "hidden_size", "intermediate_size", "heads", "kv_heads")
MODELS = {  # shape, length of a sequence, sequences of a step
    "reference": (dict(zip(SHAPE, (8192, 8, 512, 1536, 8, 4), strict=True)), 512, 4),
    "quickstart": (dict(zip(SHAPE, (4096, 4, 192, 512, 4, 2), strict=True)), 256, 8),
}


def settings(side):
    """Environment and options of a side.

    spin=N is GOMP_SPINCOUNT, policy=P OMP_WAIT_POLICY; isa=AVX2 hides bf16 instructions and AVX-512 from torch;
    threads=N is OMP_NUM_THREADS: processor time of one thread is comparable on a busy machine too, as none waits.
    src=PATH takes hlat from another checkout. keep: freed memory stays in the process. compiled: run.compile=blocks.
    torch: norms, RoPE, SwiGLU and loss in torch rather than in hlat's kernels; torch-attention: attention;
    torch-products: fp32 products by the library that torch chooses rather than by oneDNN.
    """
    words = side.split(",")
    environment = dict(os.environ)
    environment.pop("GOMP_SPINCOUNT", None)
    for word in words:
        name, _, value = word.partition("=")
        if name == "spin":
            environment["GOMP_SPINCOUNT"] = value
        elif name == "threads":
            environment["OMP_NUM_THREADS"] = value
        elif name == "policy":
            environment["OMP_WAIT_POLICY"] = value
        elif name == "isa":
            environment["DNNL_MAX_CPU_ISA"] = value
            environment["ATEN_CPU_CAPABILITY"] = "avx2"
            environment["CC"] = "gcc -mno-avx512f"
        elif name == "src":
            environment["PYTHONPATH"] = value
    return environment, {word for word in words if "=" not in word}


def worker(model_name, mode, options):
    """Train for the seconds that each line of stdin names; answer with rate, processor time, page faults and memory."""
    import resource

    import numpy as np
    import torch

    from hlat.runtime.backend.cpu import CpuBackend

    if os.environ.get("DNNL_MAX_CPU_ISA") == "AVX2":
        CpuBackend.has_fast_bf16 = lambda self, device: False  # torch asks the processor itself
    if "torch" in options:
        CpuBackend.pointwise_kernels = "torch"
    if "torch-attention" in options:
        CpuBackend.fused_attention = False
    if "torch-products" in options:
        CpuBackend.fp32_by_onednn = False
    from hlat.config.load import parse_recipe
    from hlat.data.samples.training_data import Batch
    from hlat.optim import build_optimizer
    from hlat.parallel import build_parallel
    from hlat.runtime.backend.device import peak_memory_bytes
    from hlat.runtime.distributed.join import Runtime
    from hlat.training import accumulate_gradients, update

    if "keep" in options:
        from hlat.runtime.backend.cpu import keep_freed_memory

        assert keep_freed_memory()
    shape, length, batch_size = MODELS[model_name]
    recipe = parse_recipe(
        {
            "model": shape,
            "data": {"path": "unused", "sequence_length": length},
            "batch": {"global_batch": batch_size, "micro_batch": batch_size},
            "training": {"steps": 1000},
            "precision": {"mode": mode},
            "run": {"compile": "blocks" if "compiled" in options else "none"},
        }
    )
    device = torch.device("cpu")
    begin = time.perf_counter()
    model = build_parallel(recipe, Runtime(device), seed=0)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, mode)
    generator = torch.Generator().manual_seed(1)
    number = 0

    def step():
        nonlocal number
        number += 1
        tokens = torch.randint(0, shape["vocab_size"], (batch_size, length + 1), generator=generator)
        loss = accumulate_gradients(model, Batch(tokens[:, :-1], tokens[:, 1:], np.arange(batch_size), 0))
        update(model, optimizer, recipe, number, loss)

    for _ in range(3):
        step()
    print(json.dumps({"start_up": time.perf_counter() - begin}), flush=True)
    for line in sys.stdin:
        seconds, steps, faults = float(line), 0, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()  # threads that slept and caches that others have used
        others, begin, cpu = busy(), time.perf_counter(), time.process_time()
        while time.perf_counter() - begin < seconds:
            step()
            steps += 1
        spent = time.perf_counter() - begin
        used = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        answer = {
            "rate": steps * batch_size * length / spent,
            "cpu_rate": steps * batch_size * length / (time.process_time() - cpu),
            "cpu": (time.process_time() - cpu) / spent,
            "others": (busy() - others) / spent - (time.process_time() - cpu) / spent,
            "faults": used / (steps + 1),
            "memory": peak_memory_bytes(device),
        }
        print(json.dumps(answer), flush=True)


def stolen():
    """Clock ticks that the host has given to others, and all ticks, summed over the processors."""
    values = [int(text) for text in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]]
    return values[7], sum(values[:8])


def busy():
    """Processor seconds that all programs of this machine have used."""
    values = [int(text) for text in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]]
    return (sum(values[:3]) + sum(values[5:7])) / os.sysconf("SC_CLK_TCK")


def turn(process, seconds, allowed):
    """Run one turn of a side; repeat it, up to 20 times, while other programs use more than ``allowed`` cores."""
    for _ in range(20):
        process.stdin.write(f"{seconds}\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        if answer["others"] <= allowed:
            break
    return answer


def main():
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="reference")
    parser.add_argument("--mode", default="mixed")
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--others", type=float, default=0.05, help="cores that a turn may leave to other programs")
    parser.add_argument("--sides", nargs="+", default=["spin=300000", "spin=20000"])
    parser.add_argument("--worker", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.model, arguments.mode, set(arguments.worker))
        return
    record, workers = Recorder(__file__, "cpu-settings.md"), {}
    for side in arguments.sides:
        environment, options = settings(side)
        command = [sys.executable, __file__, "--model", arguments.model, "--mode", arguments.mode, "--worker", *options]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        workers[side] = subprocess.Popen(command, env=environment, text=True, **pipes)
        workers[side].start_up = json.loads(workers[side].stdout.readline())["start_up"]
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.busy)]
    results = {side: [] for side in workers}
    before = stolen()
    for _ in range(arguments.rounds):
        for side, process in workers.items():
            results[side].append(turn(process, arguments.seconds, arguments.busy + arguments.others))
    after = stolen()
    for process in [*neighbours, *workers.values()]:
        process.terminate()
    share = (after[0] - before[0]) / (after[1] - before[1])
    print(f"{arguments.model}, {arguments.mode}, busy neighbours: {arguments.busy}, steal {share:.1%}")
    columns = (
        "side",
        "tokens/s",
        "min to max",
        "of the first",
        "tokens per CPU s",
        "of the first",
        "cores used",
        "by others",
        "page faults a step",
    )
    print(f"| {' | '.join((*columns, 'peak MiB', 'start-up s'))} |\n{'|---' * (len(columns) + 2)}|")
    first = [row["rate"] for row in results[arguments.sides[0]]]
    for side, rounds in results.items():
        rates = [row["rate"] for row in rounds]
        ratio = statistics.median(mine / theirs for mine, theirs in zip(rates, first, strict=True))
        cpu_rates = [row["cpu_rate"] for row in rounds]
        first_cpu = [row["cpu_rate"] for row in results[arguments.sides[0]]]
        cpu_ratio = statistics.median(mine / theirs for mine, theirs in zip(cpu_rates, first_cpu, strict=True))
        print(
            f"| {side} | {statistics.median(rates):,.0f} | {min(rates):,.0f} to {max(rates):,.0f} | {ratio:.3f} | "
            f"{statistics.median(cpu_rates):,.0f} | {cpu_ratio:.3f} | "
            f"{statistics.median(row['cpu'] for row in rounds):.2f} | {max(row['others'] for row in rounds):.2f} | "
            f"{statistics.median(row['faults'] for row in rounds):,.0f} | {rounds[-1]['memory'] / 2**20:,.0f} | "
            f"{workers[side].start_up:.1f} |"
        )
        claim = f"training speed, {arguments.model} model, {arguments.mode}, {side}, busy neighbours: {arguments.busy}"
        peer = {} if side == arguments.sides[0] else {"peer": f"hlat, {arguments.sides[0]}", "peer_values": first}
        record.add(claim, "tokens/s", rates, note=f"{ratio:.2f} of the first side; steal {share:.1%}", **peer)
        peer = {} if side == arguments.sides[0] else {"peer": f"hlat, {arguments.sides[0]}", "peer_values": first_cpu}
        note = f"{cpu_ratio:.2f} of the first side"
        record.add(f"{claim}, by processor time", "tokens per CPU s", cpu_rates, note=note, **peer)
    record.write()


if __name__ == "__main__":
    main()
