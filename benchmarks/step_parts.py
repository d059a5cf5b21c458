"""Time of a training step, part by part, summed against the whole step.

    hlat's training loop, 33.6 M parameters --every other step--> time of each operator
                                            --the other steps--> time of the whole step and of its phases

One process for each mode trains text of random letters as ``hlat train`` does: data, gradient norm, verdict, optimizer,
metrics; modes alternate in rounds. Operators are timed by a dispatch mode of torch. With one thread time is processor
time of the process, which a busy machine changes least; with several it is the clock's, since threads that wait for
each other use the processor too: then the machine has to be quiet. What the untimed steps take beyond the operators
and the phases around them is Python, autograd and dispatch. Each product of matrices is compared with the fastest of
some ways of multiplying matrices of its shape and dtype in the same process: contiguous or transposed operands, by the
library of torch's choice or by oneDNN. The share of that rate, times the share of products in the step, is the
utilization of measured GEMM. MFU is as in ``metrics.jsonl``: FLOPs that the model needs, of the measured peak.

    python benchmarks/step_parts.py [--threads 1] [--steps 6] [--rounds 2] [--modes mixed bf16-sr fp32]
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from results import Recorder

SHAPE = {"vocab_size": 8192, "layers": 8, "hidden_size": 512, "intermediate_size": 1536, "heads": 8, "kv_heads": 4}
LENGTH, ROWS, WARM = 512, 4, 3
COMPUTING = ("forward", "backward")
PHASES = {"reduce": "gradient norm", "device": "verdict", "optimizer": "optimizer, clipping", "data": "data"}
PRODUCTS = ("mm", "addmm", "_linear_pointwise")
BLOCKS, HEAD, ATTENTION = "products of blocks", "head: products", "attention"
POINTWISE, LOSS = "norms, RoPE, SwiGLU", "head: loss and its gradient"
CASTS, OTHER, PYTHON = "casts and copies", "embedding, sums, other operators", "Python, autograd, dispatch"
COMPONENTS = "metrics, components"
PARTS = (BLOCKS, HEAD, ATTENTION, POINTWISE, LOSS, CASTS, OTHER, *PHASES.values(), COMPONENTS, PYTHON)


def part_of(name, shapes):
    """Part of the step of an operator of forward or backward, from its name and the shapes of its operands."""
    if name in PRODUCTS:
        return HEAD if any(SHAPE["vocab_size"] in shape for shape in shapes) else BLOCKS
    if "attention" in name or "attend" in name:
        return ATTENTION
    if any(word in name for word in ("norm", "rotate", "swiglu")):
        return POINTWISE
    if "loss" in name or any(SHAPE["vocab_size"] in shape and len(shape) == 2 for shape in shapes[:1]):
        return LOSS
    return CASTS if name in ("_to_copy", "copy_", "clone", "cat", "fill_", "zero_", "zeros_like") else OTHER


class Timer:
    """Time of phases in some steps, and of operators in the steps between them."""

    def __init__(self, mode, clock):
        self.mode, self.clock = mode, clock  # the dispatch mode; seconds
        self.step, self.phase, self.began = 0, "start", clock()
        self.processor, self.used = 0.0, time.process_time()  # processor seconds of the steps whose phases are timed
        self.phases, self.operators = defaultdict(float), defaultdict(list)  # operators: seconds of each call
        self.stack = ExitStack()

    @property
    def times_operators(self):
        return self.step > WARM and self.step % 2 == 1

    def __call__(self, phase):
        """Observe a phase that begins."""
        now, used = self.clock(), time.process_time()
        if self.step > WARM and not self.times_operators:
            self.phases[self.phase] += now - self.began
            self.processor += used - self.used
        if phase == "data":
            self.step += 1
        if self.times_operators and phase in COMPUTING and self.phase not in COMPUTING:
            self.stack.enter_context(self.mode)
        if phase not in COMPUTING:
            self.stack.close()
        self.phase, self.used, self.began = phase, time.process_time(), self.clock()


def timing_mode(operators, clock):
    """Dispatch mode that adds the time of each operator to a table by name, shapes and dtype."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Timing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            began = clock()
            result = function(*arguments, **(options or {}))
            spent = clock() - began
            tensors = [each for each in arguments if hasattr(each, "shape")]
            shapes = tuple(tuple(each.shape) for each in tensors)
            dtype = str(tensors[0].dtype) if tensors else ""
            operators[(function._schema.name.partition("::")[2], shapes, dtype)].append(spent)
            return result

    return Timing()


def corpus(folder):
    """Write text of random letters; return its path."""
    path, letters = Path(folder) / "text.txt", random.Random(1)
    lines = ("".join(letters.choices("abcdefghijklmnop ", k=400)) for _ in range(1500))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def worker(mode, threads, steps, folder):
    """Train; print the seconds of a step by part, and the products with their measured rates."""
    import torch

    from hlat.config.load import parse_recipe
    from hlat.hardware import peak_flops
    from hlat.model.counts import flops_per_token
    from hlat.precision import MODES
    from hlat.runtime.progress import observe_phases
    from hlat.training import run

    torch.set_num_threads(threads)
    recipe = parse_recipe(
        {
            "run": {"dir": f"{folder}/run-{mode}-{time.time_ns()}", "compile": "none"},
            "model": SHAPE,
            "data": {
                "path": str(corpus(folder)),
                "prepared_dir": f"{folder}/data",
                "tokenizer": {"train": "char"},
                "validation": {"fraction": 0},
            }
            | {"sequence_length": LENGTH},
            "batch": {"global_batch": ROWS, "micro_batch": ROWS},
            "training": {"steps": 2 * steps + WARM, "log_every": 1},
            "precision": {"mode": mode},
            "checkpoint": {"every_steps": 1000},
            "tracking": {"tensorboard": False, "console": "plain"},
        }
    )
    clock = clock_of(threads)
    timer = Timer(None, clock)
    timer.mode = timing_mode(timer.operators, clock)
    with observe_phases(timer), Path(os.devnull).open("w", encoding="utf-8") as quiet:
        run(recipe, stream=quiet)
    found = summary(timer, steps, clock)
    peak = peak_flops(torch.device("cpu"), MODES[mode].compute)
    found |= {"model_flops": flops_per_token(recipe.model, LENGTH) * ROWS * LENGTH, "peak": peak.value}
    print(json.dumps(found | {"source": peak.source}))


def clock_of(threads):
    """Return the clock that counts: processor time of one thread, else the time that passes."""
    return time.process_time if threads == 1 else time.perf_counter


def sizes(name, shapes):
    """Rows, summed elements and columns of a product."""
    if name == "_linear_pointwise":
        return math.prod(shapes[0][:-1]), *reversed(shapes[1])
    return *shapes[-2], shapes[-1][1]


def fastest(rows, summed, columns, dtype, clock):
    """Seconds of the fastest of some ways to multiply matrices."""
    import torch

    kind = {"dtype": getattr(torch, dtype.removeprefix("torch."))}
    left, right = torch.randn(rows, summed, **kind), torch.randn(summed, columns, **kind)
    left_T, right_T = left.T.contiguous(), right.T.contiguous()
    ways = [lambda: left @ right, lambda: left @ right_T.T, lambda: left_T.T @ right]
    if kind["dtype"] == torch.float32:
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(left, right_T, None, "none", [], ""))
    seconds = []
    for way in ways:
        for number in range(7):
            began = clock()
            way()
            seconds += [clock() - began] if number > 1 else []
    return min(seconds)


def summary(timer, steps, clock):
    """Seconds of a step by part, and of its products if each took as long as the fastest of its shape."""
    parts, ideal, flops = defaultdict(float), defaultdict(float), defaultdict(float)
    for (name, shapes, dtype), calls in timer.operators.items():
        part = part_of(name, shapes)
        parts[part] += sum(calls) / steps
        if part in (BLOCKS, HEAD):
            of_shape = sizes(name, shapes)
            ideal[part] += len(calls) / steps * fastest(*of_shape, dtype, clock)
            flops[part] += len(calls) / steps * 2 * math.prod(of_shape)
    parts[PYTHON] = sum(timer.phases[phase] for phase in COMPUTING) / steps - sum(parts.values())
    parts |= {title: timer.phases[phase] / steps for phase, title in PHASES.items()}
    whole = sum(timer.phases.values()) / steps
    parts[COMPONENTS] = whole - sum(parts.values())
    return {
        "parts": parts,
        "whole": whole,
        "ideal": ideal,
        "flops": flops,
        "processor": timer.processor / steps,
        "operators": sum(map(len, timer.operators.values())) / steps,
    }


def main():
    """Print and record the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--modes", nargs="+", default=["mixed", "bf16-sr", "fp32"])
    parser.add_argument("--worker", nargs=2, metavar=("MODE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], options.threads, options.steps, options.worker[1])
        return
    record, found = Recorder(__file__, "speed.md"), {mode: [] for mode in options.modes}
    numbers = [f"--{name}={getattr(options, name)}" for name in ("threads", "steps")]
    with tempfile.TemporaryDirectory() as folder:
        for mode in options.modes * options.rounds:
            command = [sys.executable, __file__, *numbers, "--worker", mode, folder]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[mode].append(json.loads(done.stdout.splitlines()[-1]))
    table(found)
    for mode, rounds in found.items():
        title = f"step of 33.6 M parameters, {ROWS} x {LENGTH}, {mode}, {options.threads} thread(s)"
        report(record, title, rounds, "ms of processor time" if options.threads == 1 else "ms")
    default = options.modes == parser.get_default("modes")
    record.write("-".join(["step_parts", str(options.threads), *([] if default else options.modes)]))


def table(found):
    """Print milliseconds by part and mode, with shares of the step."""
    print(f"| part | {' | '.join(found)} |\n|---{'|---' * len(found)}|")
    wholes = [statistics.median(each["whole"] for each in rounds) for rounds in found.values()]
    for part in PARTS:
        row(part, [f"{1e3 * at:,.1f} ({at / whole:.1%})" for at, whole in zip(of(found, part), wholes, strict=True)])
    row("step", [f"{1e3 * whole:,.1f}" for whole in wholes])
    for part in (BLOCKS, HEAD):
        pairs = zip(of(found, part, "ideal"), of(found, part, "flops"), of(found, part), strict=True)
        row(f"{part}, of measured GEMM", [f"{i / s:.0%}, {f / s / 1e9:,.0f} GFLOP/s" for i, f, s in pairs])
    row("utilization of measured GEMM", [f"{statistics.median(map(utilization, r)):.0%}" for r in found.values()])
    row("MFU", [f"{statistics.median(map(mfu, r)):.0%}" for r in found.values()])
    row("processor time of a step", [f"{1e3 * middle(r, 'processor'):,.0f}" for r in found.values()])
    row("operators of forward and backward", [f"{middle(r, 'operators'):,.0f}" for r in found.values()])
    row("peak", [f"{middle(r, 'peak') / 1e9:,.0f} GFLOP/s: {r[0]['source']}" for r in found.values()])


def middle(rounds, name):
    """Median of a number over the rounds."""
    return statistics.median(each[name] for each in rounds)


def mfu(each):
    """FLOPs that the model needs in a step, of those that the measured peak allows in its time."""
    return each["model_flops"] / each["whole"] / each["peak"]


def row(title, cells):
    """Print a row of the table."""
    print(f"| {title} | {' | '.join(cells)} |")


def of(found, part, kind="parts"):
    """Medians over the rounds of each mode of the seconds (or FLOPs) of a part."""
    return [statistics.median(each[kind].get(part, 0.0) for each in rounds) for rounds in found.values()]


def utilization(each):
    """Share of the step that its products would take if each were as fast as the fastest of its shape."""
    return sum(each["ideal"].values()) / each["whole"]


def report(record, title, rounds, unit):
    """Record the parts of one mode."""
    record.add(f"{title}, whole step", unit, [1e3 * each["whole"] for each in rounds])
    for part in PARTS:
        values = [1e3 * each["parts"].get(part, 0.0) for each in rounds]
        record.add(f"{title}: {part}", unit, values)
    for part in (BLOCKS, HEAD):
        shares = [each["ideal"][part] / each["parts"][part] for each in rounds]
        record.add(f"{title}: rate of {part} as a share of measured GEMM of these shapes", "1", shares)
    record.add(f"{title}: utilization of measured GEMM", "1", list(map(utilization, rounds)))
    record.add(f"{title}: MFU", "1", list(map(mfu, rounds)), note=rounds[0]["source"])
    record.add(f"{title}: processor time of a step", "ms", [1e3 * each["processor"] for each in rounds])


if __name__ == "__main__":
    main()
