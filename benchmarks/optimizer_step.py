"""Speed of AdamW over bf16 weights with stochastic rounding, torch's fused fp32 AdamW, and a plain copy.

Steps the parameters of the 33.6 M-parameter LLaMA of ``benchmarks/train_speed.py`` (``--layers`` for more of them).
All sides alternate in one process, and the median round of each is reported, so that a slow minute of the machine
affects all; the plain kernel, which takes as long as all others together, has one round. GB/s are the bytes that a side
has to move over its time: 14 per element for bf16-sr (weight, gradient and moments read, weight and moments written, in
bf16), 28 for fp32; the copy moves 14 too, 7 read and 7 written.

    python benchmarks/optimizer_step.py [--rounds 9] [--layers 8] [--device cuda] [--compile]
    python benchmarks/optimizer_step.py --generators   cost of the random bits, by generator, on this CPU
    python benchmarks/optimizer_step.py --norms        sum of squares of bf16 gradients, in processor time
    python benchmarks/optimizer_step.py --clipping     clipping within the update and before it, in processor time
    python benchmarks/optimizer_step.py --check        the kernels of this machine equal the plain one bit for bit

``--compile`` adds the plain kernel under torch.compile. Without a GPU, ``--check`` runs Triton's kernel in its
interpreter if triton is installed and TRITON_INTERPRET=1 is set.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from unittest.mock import patch

import torch

from hlat.config.sections.model import ModelConfig
from hlat.config.sections.training import AdamWConfig
from hlat.model import Decoder, collect_local_parameters
from hlat.optim import adamw_reference as reference
from hlat.optim import build_optimizer
from hlat.optim import cpu_kernels as native
from hlat.optim.adamw import kernel_for
from hlat.optim.adamw_reference import ElementAddresses, Operands
from hlat.parallel.data_parallel import _norms_of_runs, sum_of_squares
from hlat.runtime.backend.device import synchronize
from results import Recorder

WIDTH = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "heads": 8, "kv_heads": 4}
PLAIN = "bf16-sr, plain torch"
KEYS = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)


def parameters(layers, dtype, device):
    """Parameters of the model, with weights and gradients as large as in training."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(**WIDTH, layers=layers)).to(dtype)
    held = collect_local_parameters(model.to_empty(device=device))
    for local in held:
        torch.nn.init.normal_(local.parameter, std=0.02)
        local.parameter.grad = 1e-3 * torch.randn_like(local.parameter)
    return held


def bf16_side(layers, device, kernel):
    """A step in bf16-sr with one of the kernels."""
    optimizer = build_optimizer(parameters(layers, torch.bfloat16, device), AdamWConfig(lr=1e-4), "bf16-sr")
    optimizer.__dict__["_kernel"] = kernel
    return optimizer.step


def fp32_side(layers, device):
    """A step of torch's fused AdamW in fp32."""
    return build_optimizer(parameters(layers, torch.float32, device), AdamWConfig(lr=1e-4)).step


def copy_side(elements, device):
    """A copy of seven bytes an element."""
    source = torch.ones(elements * 7 // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def compiled_kernel():
    """The plain kernel under torch.compile, a parameter at a time; with inductor's square root, which is exact."""

    def step(weight, gradient, exp_avg, exp_avg_sq, scalars, rows, columns, names, keys):
        lines = ElementAddresses(weight.shape[1], rows, columns, names)
        operand = Operands(weight, gradient, exp_avg, exp_avg_sq, None, scalars, lines)
        reference.update_lines(operand, keys, "bf16-sr")

    options = {"emulate_precision_casts": True}  # or the scaled gradient is not rounded
    compiled = torch.compile(step, dynamic=True, fullgraph=True, options=options)

    def kernel(operands, keys, _mode):
        with patch.object(reference, "square_root", torch.sqrt):
            for operand in operands:
                tables = (operand.addresses.rows_L, operand.addresses.columns_L, operand.addresses.names_L)
                compiled(
                    operand.weight,
                    operand.gradient,
                    operand.exp_avg,
                    operand.exp_avg_sq,
                    operand.scalars,
                    *tables,
                    keys,
                )

    return kernel


def timed(step, device):
    """Seconds of a call."""
    synchronize(device)
    began = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - began


def measure(sides, rounds, device):
    """Seconds of the first call of each side, and of each of the other calls."""
    first = {name: timed(step, device) for name, step in sides.items()}
    times = {name: [] for name in sides}
    for number, (name, step) in itertools.product(range(rounds), sides.items()):
        if name != PLAIN or number == 0:
            times[name].append(timed(step, device))
    return first, times


def speed(options):
    """Print the table of speeds."""
    device, record = torch.device(options.device), Recorder(__file__, "precision.md", device=options.device)
    elements = sum(local.parameter.numel() for local in parameters(options.layers, torch.bfloat16, "meta"))
    sides = {
        "bf16-sr, fused": (14, bf16_side(options.layers, device, kernel_for(device))),
        PLAIN: (14, bf16_side(options.layers, device, reference.update)),
        "fp32, torch fused AdamW": (28, fp32_side(options.layers, device)),
        "copy": (14, copy_side(elements, device)),
    }
    if options.compile:
        sides["bf16-sr, plain torch compiled"] = (14, bf16_side(options.layers, device, compiled_kernel()))
    first, times = measure({name: step for name, (_, step) in sides.items()}, options.rounds, device)
    print(
        f"{elements / 1e6:.1f} M parameters on {device}, {torch.get_num_threads()} threads, torch {torch.__version__}\n"
    )
    print("| side | first step s | step ms | ns/element | B/element | GB/s |\n|---|---|---|---|---|---|")
    for name, (size, _) in sides.items():
        seconds = statistics.median(times[name])
        print(
            f"| {name} | {first[name]:.2f} | {1e3 * seconds:.1f} | {1e9 * seconds / elements:.2f} | {size} "
            f"| {size * elements / seconds / 1e9:.1f} |"
        )
    each = {name: [1e9 * seconds / elements for seconds in rounds] for name, rounds in times.items()}
    claim = f"AdamW step of {elements / 1e6:.1f} M parameters in bf16-sr, {torch.get_num_threads()} threads"
    for name in list(sides)[1:]:
        record.add(claim, "ns per element", each["bf16-sr, fused"], peer=name, peer_values=each[name])
    record.write()


THREEFRY_20 = (
    "ROUND(29) ROUND(16) ROUND(24) INJECT(key1, key2, 4u) ROUND(13) ROUND(15) ROUND(26) ROUND(6) INJECT(key2, key0, 5u)"
)
PHILOX_2X32_10 = """uint32_t first = (uint32_t)index + start0, second = start1, key = key0;
    for (int round = 0; round < 10; round++) {
        const uint64_t product = (uint64_t)0xD256D193u * first;
        first = (uint32_t)(product >> 32) ^ key ^ second, second = (uint32_t)product, key += 0x9E3779B9u;
    }"""


def generators(options):
    """Print the cost of the random bits: the step with each generator less the step with the address for bits."""
    record = Recorder(__file__, "precision.md")
    source = native._SOURCE.read_text()
    start, stop = source.index("uint32_t first = start0"), source.index("exp_avg[at] = stochastic(")
    threefry = source[start:stop]
    variants = {
        "none": "const uint32_t first = start0 + (uint32_t)index, second = start1;",
        "Threefry-2x32-13": threefry,
        "Threefry-2x32-20": threefry + THREEFRY_20,
        "Philox-2x32-10": PHILOX_2X32_10,
    }
    torch.set_num_threads(1)
    sides = {}
    for name, generator in variants.items():
        native._library.cache_clear()
        with tempfile.NamedTemporaryFile("w", suffix=".c") as file, patch.object(native, "_SOURCE", file.name):
            file.write(source[:start] + generator + source[stop:])
            file.flush()
            sides[name] = bf16_side(options.layers, torch.device("cpu"), kernel_for(torch.device("cpu")))
    native._library.cache_clear()
    elements = sum(local.parameter.numel() for local in parameters(options.layers, torch.bfloat16, "meta"))
    _, times = measure(sides, options.rounds, torch.device("cpu"))
    middle = {name: statistics.median(values) for name, values in times.items()}
    print("| generator | step, ns/element on one core | of these random bits |\n|---|---|---|")
    for name, seconds in middle.items():
        print(f"| {name} | {1e9 * seconds / elements:.2f} | {1e9 * (seconds - middle['none']) / elements:.2f} |")
        each = [1e9 * (taken - free) / elements for taken, free in zip(times[name], times["none"], strict=True)]
        record.add(f"48 random bits of {name} in a step of AdamW, one core", "ns per element", each)
    record.write("optimizer_step-generators")


def on_processor(sides, options, elements, record, claim, peer):
    """Print and record the processor time of two sides with one and with two threads, alternating."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        times = {name: [] for name in sides}
        for number, (name, step) in itertools.product(range(options.rounds + 1), sides.items()):
            began = time.process_time()
            step()
            times[name] += [1e9 * (time.process_time() - began) / elements] if number else []
        for name, each in times.items():
            print(f"{threads} threads, {name}: {statistics.median(each):.2f} ns/element of processor time")
        ours, theirs = times.values()
        whole = f"{claim}, {threads} thread(s), processor time"
        record.add(whole, "ns per element", ours, peer=peer, peer_values=theirs)


def clipping(options):
    """Print the processor time of a clipped step: scaled by the update, and as before, in place before it."""
    record, norm = Recorder(__file__, "precision.md"), torch.tensor(3.0)
    held = parameters(options.layers, torch.bfloat16, "cpu")
    optimizer = build_optimizer(held, AdamWConfig(lr=1e-4), "bf16-sr")
    elements = sum(each.parameter.numel() for each in held)

    def scaled_by_the_update():
        optimizer.clip_gradients(norm, 1.0)
        optimizer.step()

    def scaled_before():
        torch.nn.utils.clip_grads_with_norm_([each.parameter for each in held], 1.0, norm)
        optimizer.step()

    sides = {"scaled by the update": scaled_by_the_update, "scaled before": scaled_before}
    claim, peer = f"clipped step of bf16-sr, {elements / 1e6:.1f} M", "torch.nn.utils.clip_grads_with_norm_ before it"
    on_processor(sides, options, elements, record, claim, peer)
    record.write("optimizer_step-clipping")


def norms(options):
    """Print the processor time of the sum of squares of bf16 gradients: now, and as before, from fp32 copies."""
    record, zero = Recorder(__file__, "precision.md"), torch.zeros(())
    gradients = [local.gradient for local in parameters(options.layers, torch.bfloat16, "cpu")]
    elements = sum(gradient.numel() for gradient in gradients)

    def widened():
        parts = (part.float() for each in gradients for part in each.reshape(-1).split(1 << 15))
        return torch.cat([norm for part in parts for norm in _norms_of_runs(part)]).double().square().sum()

    sides = {"compiled": lambda: sum_of_squares(gradients, zero), "before, norms of fp32 copies": widened}
    claim = f"sum of squares of {elements / 1e6:.1f} M bf16 gradients"
    peer = "hlat before: torch, norms of runs of 256 elements of fp32 copies"
    on_processor(sides, options, elements, record, claim, peer)
    record.write("optimizer_step-norms")


def check(options):
    """Compare the kernels on random bits of every kind."""
    record, cases = Recorder(__file__, "precision.md", device=options.device), 0
    device = torch.device(options.device)
    kernels = {"default": kernel_for(device)}
    if device.type == "cpu" and find_spec("triton"):
        from hlat.optim import adamw_triton as cuda

        kernels["Triton"] = cuda.update
    shapes = ((1, 1), (3, 7), (37, 129), (5, 1100))
    for rounding, wide, shape in itertools.product(reference.ROUNDINGS, (False, True), shapes):
        for name, kernel in kernels.items():
            plain, other = (random_operands(rounding, wide, *shape, place) for place in ("cpu", device))
            for _ in range(3):
                reference.update([plain], KEYS, rounding)
                kernel([other], KEYS.to(device), rounding)
            for field in ("weight", "exp_avg", "exp_avg_sq", "compensation"):
                mine, theirs = getattr(plain, field), getattr(other, field)
                if mine is not None:
                    torch.testing.assert_close(theirs.cpu(), mine, rtol=0, atol=0, equal_nan=True)
            print(f"{name} kernel, {rounding}, {'fp32' if wide else 'bf16'} gradients, {shape}: equal")
            cases += 1
    record.add("AdamW kernels equal the plain kernel bit for bit", "cases", cases, note=", ".join(kernels))
    record.write("optimizer_step-check")


def random_operands(rounding, wide, lines, length, device):
    """Operands of any bits: every exponent, subnormals, infinities, NaN."""
    generator = torch.Generator().manual_seed(lines)

    def bits(bound, dtype, as_dtype):
        words = torch.randint(-bound, bound, (lines, length), generator=generator)
        return words.to(dtype).view(as_dtype).to(device)

    weight, gradient, exp_avg, exp_avg_sq, lost = (bits(1 << 15, torch.int16, torch.bfloat16) for _ in range(5))
    tables = torch.randint(0, 3, (3, lines), generator=generator).to(torch.int32).to(device)
    scalars = torch.tensor([3e-5, 1.1e-3, 0.1, 0.95, 0.05, 3.3, 1e-8, 0.37], device=device)
    compensation = lost if "kahan" in rounding else None
    made = Operands(
        weight, gradient, exp_avg, exp_avg_sq.abs(), compensation, scalars, ElementAddresses(length, *tables)
    )
    return replace(made, gradient=bits(1 << 31, torch.int32, torch.float32)) if wide else made


def main():
    """Print and record the table that the options name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", action="store_true", help="also the plain kernel under torch.compile; a minute to compile"
    )
    parser.add_argument("--generators", action="store_true", help="cost of the random bits")
    parser.add_argument("--norms", action="store_true", help="sum of squares of the gradients")
    parser.add_argument("--clipping", action="store_true", help="a step that clips")
    parser.add_argument("--check", action="store_true", help="only compare the kernels bit for bit")
    options = parser.parse_args()
    kinds = {"check": check, "norms": norms, "clipping": clipping, "generators": generators}
    next((kind for name, kind in kinds.items() if getattr(options, name)), speed)(options)


if __name__ == "__main__":
    main()
