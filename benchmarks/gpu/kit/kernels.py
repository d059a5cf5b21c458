"""Single kernels against formulas: AdamW's rounding bit by bit, the others against float64.

arbitrary bits --kernel of the device, plain kernel on the CPU--> the same bits
random numbers --hlat's function on the device; the formula in float64--> relative error of value and gradients
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F

from kit.child import Context

# Rounding once to bf16 moves an element by at most 2^-9 of it. Values and gradients here are rounded at most twice,
# or have the rounding of an operand in them: the norm of the error is below twice that of one rounding.
_ROUNDED = {torch.bfloat16: 2 * 2.0**-9, torch.float32: 1e-5}
_ATTENTION = 8 * 2.0**-9  # scores, probabilities, their gradients and those of the inputs are rounded, and add up


def run(context: Context) -> None:
    """Check every kernel; first of all, that it is tried: without a compiler torch would be compared with itself."""
    from hlat.model.kernels.library import describe_kernels
    from hlat.optim.adamw import kernel_for

    device = torch.device(context.device)
    tried = [describe_kernels(device), kernel_for(device).__module__]
    context.found({"kernels tried": tried})
    if device.type == "cuda":
        expected = tried[0].startswith("fused Triton") and tried[1].endswith("adamw_triton")
        context.check("norms, RoPE, SwiGLU, loss and AdamW are computed in Triton", expected, tried)
    for part in (attention_choice, pointwise, loss, documents, adamw_rate, adamw):  # the last one compiles most
        with context.part(part.__name__):
            part(context)


def adamw(context: Context) -> None:
    """Compare the update of bf16 weights with its definition, on operands with any bits."""
    from hlat.optim import adamw_reference as reference

    kernel = _update(context)
    if kernel is None:
        return
    lengths = ((3, 70),) if context.tiny else ((5, 1500), (2, 4096))
    different, keys = [], torch.tensor([[1, -2, 3], [4, 5, -6]], dtype=torch.int32)
    for rounding in reference.ROUNDINGS:
        for gradient in (torch.bfloat16, torch.float32):
            for shape in lengths:
                plain, mine = operands(rounding, gradient, *shape), operands(rounding, gradient, *shape)
                mine = _moved(mine, context.device)
                for step in range(2):
                    reference.update([plain], keys + step, rounding)
                    kernel([mine], (keys + step).to(context.device), rounding)
                if any((a != b).any() for a, b in zip(_bits(plain), _bits(_moved(mine, "cpu")), strict=True)):
                    different.append(f"{rounding} {gradient} {shape}")
    cases = len(reference.ROUNDINGS) * 2 * len(lengths)
    context.found({"adamw cases": cases})
    context.check("the kernel of AdamW has the bits of its definition", not different, different)


def operands(rounding: str, gradient: torch.dtype, lines: int, length: int) -> Any:
    """Return operands of AdamW with any bits, the same in each call: every exponent, infinities and NaN too."""
    from hlat.optim.adamw_reference import ElementAddresses, Operands

    generator = torch.Generator().manual_seed(lines + length)

    def words(integers: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
        bound = 1 << (8 * integers.itemsize - 1)
        return torch.randint(-bound, bound, (lines, length), generator=generator).to(integers).view(dtype)

    weight, first, second, lost = (words(torch.int16, torch.bfloat16) for _ in range(4))
    given = words(torch.int16 if gradient == torch.bfloat16 else torch.int32, gradient)
    rows = torch.randint(0, 1 << 31, (2, lines), generator=generator).to(torch.int32)
    names = torch.randint(0, 3, (lines,), generator=generator).to(torch.int32)
    scalars = torch.tensor([3e-5, 1.1e-3, 0.1, 0.95, 0.05, 3.3, 1e-8, 0.37])
    compensation = lost if "kahan" in rounding else None
    return Operands(weight, given, first, second.abs(), compensation, scalars, ElementAddresses(length, *rows, names))


def _bits(written: Any) -> list[torch.Tensor]:
    """Return the bits that a step writes; all NaN count as the same."""
    tensors = [written.weight, written.exp_avg, written.exp_avg_sq]
    tensors += [] if written.compensation is None else [written.compensation]
    return [torch.where(tensor.isnan(), 0x7FC0, tensor.view(torch.int16).int()) for tensor in tensors]


def _update(context: Context) -> Callable[..., None] | None:
    """Return the update to try: the device's; on a CPU that of CUDA in Triton's interpreter, if it is installed."""
    from hlat.optim.adamw import kernel_for

    if context.device != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return kernel_for(torch.device(context.device))
    try:
        from hlat.optim.adamw_triton import update
    except ImportError as error:
        context.skip("adamw", f"Triton is not installed: {error}")
        return None
    return update


def _moved(given: Any, device: str) -> Any:
    """Return operands, or addresses, with their tensors on a device."""
    values = {field.name: getattr(given, field.name) for field in fields(given)}
    moved = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
    if "addresses" in values:
        moved["addresses"] = _moved(values["addresses"], device)
    return replace(given, **moved)


def adamw_rate(context: Context) -> None:
    """Measure the update of one large bf16 parameter: 14 bytes per element in bf16-sr."""
    from hlat.runtime.backend.device import synchronize
    from kit.training import device_of

    if os.environ.get("TRITON_INTERPRET") == "1":
        context.skip("adamw_rate", "Triton's interpreter has no rate")
        return
    from hlat.optim import adamw_reference as reference
    from hlat.optim.adamw_reference import ElementAddresses

    rows, columns = (64, 64) if context.tiny else (32768, 8192)
    device = device_of(context.device)
    weight, gradient, first = (torch.randn(rows, columns, device=device).bfloat16() for _ in range(3))
    numbers = torch.arange(rows, dtype=torch.int32, device=device)
    addresses = ElementAddresses(columns, numbers, torch.zeros_like(numbers), torch.zeros_like(numbers))
    scalars = torch.tensor([3e-5, 1.1e-3, 0.1, 0.95, 0.05, 3.3, 1e-8, 0.37], device=device)
    given = reference.Operands(weight, gradient, first, first.abs(), None, scalars, addresses)
    keys = torch.zeros((2, 1), dtype=torch.int32, device=device)
    kernel = _update(context)
    assert kernel is not None, "a kernel is missing in the interpreter only"
    seconds = []
    for _ in range(6):
        synchronize(device)
        began = time.perf_counter()
        kernel([given], keys, "bf16-sr")
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    context.found({"adamw_gb_per_second": 14 * rows * columns / min(seconds) / 1e9})


def _numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def errors(
    function: Callable[..., torch.Tensor],
    formula: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    dtype: torch.dtype,
    device: str,
) -> dict[str, float]:
    """Return the errors of value and gradients of a function on a device, relative to the norm of the formula's.

    Args:
        function: computes on the device, in ``dtype``.
        formula: computes in float64 on the CPU, from the same rounded inputs.
        inputs: float64, on the CPU.
        dtype: dtype of the device's inputs.
        device: the device.
    """
    mine = [each.to(device, dtype).detach().requires_grad_() for each in inputs]
    exact = [each.detach().cpu().double().requires_grad_() for each in mine]
    out, true = function(*mine), formula(*exact)
    weights = _numbers(99, *true.shape)
    given = weights.to(device, out.dtype)
    true.backward(given.detach().cpu().double())
    out.backward(given)
    pairs = {"value": (out, true)} | {
        f"gradient {number}": (a.grad, b.grad) for number, (a, b) in enumerate(zip(mine, exact, strict=True))
    }
    return {name: _error(a, b) for name, (a, b) in pairs.items()}


def _error(found: torch.Tensor | None, true: torch.Tensor | None) -> float:
    assert found is not None and true is not None, "both have a gradient"
    return float((found.detach().cpu().double() - true.detach()).norm() / true.detach().norm())


def _report(context: Context, name: str, found: dict[str, float], bound: float) -> None:
    context.found({f"{name}: errors": found})
    context.check(f"{name} is the formula, as its dtype rounds", all(each <= bound for each in found.values()), found)


def pointwise(context: Context) -> None:
    """Check norm, RoPE and SwiGLU."""
    from hlat.model.pointwise import gated, rms_norm, rotate

    rows, width = (8, 64) if context.tiny else (512, 4096)
    x, weight, up = _numbers(1, rows, width), _numbers(2, width), _numbers(3, rows, width)
    angles = _numbers(4, rows, width // 2).float()
    cos, sin = angles.cos().to(context.device), angles.sin().to(context.device)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    def turn(x: torch.Tensor) -> torch.Tensor:  # one head at each of the positions
        tables = (each.view(rows, 1, 1, -1) for each in (cos, sin))
        return rotate(x.view(1, rows, 1, 1, width), *tables).view(rows, width)

    def rope(x: torch.Tensor) -> torch.Tensor:
        (a, b), c, s = x.chunk(2, -1), cos.cpu().double(), sin.cpu().double()
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    for dtype, bound in _ROUNDED.items():
        kind = str(dtype).removeprefix("torch.")
        cases: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], list[torch.Tensor]]] = {
            "norm": (lambda x, w: rms_norm(x, w, 1e-5), norm, [x, weight]),
            "rope": (turn, rope, [x]),
            "swiglu": (gated, lambda a, b: F.silu(a) * b, [x, up]),
        }
        for name, (function, formula, inputs) in cases.items():
            _report(context, f"{name}, {kind}", errors(function, formula, inputs, dtype, context.device), bound)


def loss(context: Context) -> None:
    """Check the loss by chunks against cross-entropy of all logits."""
    from hlat.model import CrossEntropy, head_loss

    tokens, width, words = (40, 32, 96) if context.tiny else (3000, 512, 32000)
    labels = torch.randint(0, words, (tokens,), generator=torch.Generator().manual_seed(5))
    labels[::7] = -100

    def ours(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return head_loss(hidden, weight, labels.to(context.device), CrossEntropy())

    def formula(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(hidden @ weight.T, labels, reduction="sum")

    inputs = [_numbers(6, tokens, width), _numbers(7, words, width) / width**0.5]
    for dtype, bound in _ROUNDED.items():
        found = errors(ours, formula, inputs, dtype, context.device)
        # Logits and their gradients are rounded, and then the gradients of the inputs.
        _report(context, f"loss, {str(dtype).removeprefix('torch.')}", found, 2 * bound)


def documents(context: Context) -> None:
    """Check attention within documents and windows, grouped heads: the device's kernel, and flex attention's mask."""
    from hlat.model import DocumentMask

    rows, length, heads, kv, width = (2, 40, 4, 2, 16) if context.tiny else (2, 1000, 8, 2, 128)
    ends = torch.tensor([[0, length // 3, length // 2], [0, 5, length - 3]])
    offsets = torch.arange(length)
    positions = torch.stack([offsets - row[(offsets[:, None] >= row).sum(1) - 1] for row in ends])
    inputs = [_numbers(8, rows, heads, length, width), _numbers(9, rows, kv, length, width)]
    inputs.append(_numbers(10, rows, kv, length, width))
    for window in (None, length // 5):
        first = (offsets - positions).maximum(offsets - (window or length) + 1)
        seen = (first[:, :, None] <= offsets) & (offsets <= offsets[:, None])

        def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor = seen) -> torch.Tensor:
            k, v = (each.repeat_interleave(heads // kv, 1) for each in (k, v))
            scores = (q @ k.mT / width**0.5).masked_fill(~seen[:, None], -torch.inf)
            return scores.softmax(-1) @ v

        mask = DocumentMask.from_positions(positions.to(context.device), ((0, length),), window)
        kernels = {"kernel of the device": mask.attend}
        if mask.blocks is None:
            kernels["flex"] = _flex_on_cpu(first, offsets, length)
        for name, attend in kernels.items():
            found = errors(attend, formula, inputs, torch.bfloat16, context.device)
            _report(context, f"documents, {name}, window {window}", found, _ATTENTION)


def _flex_on_cpu(first: torch.Tensor, offsets: torch.Tensor, keys: int) -> Callable[..., torch.Tensor]:
    """Return flex attention with hlat's block mask, uncompiled: it then computes all scores, gradients too.

    torch refuses gradients on a CPU because its compiled kernel has none there; the formula has.
    """
    from unittest.mock import patch

    from torch.nn.attention import flex_attention as module

    from hlat.model.document_attention import block_mask

    blocks = block_mask(first, offsets, keys)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        compiled = patch.object(torch.compiler, "is_dynamo_compiling", lambda: False)
        with patch.object(module, "_validate_device", lambda *given: None), compiled:
            out: Any = module.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
        return out

    return attend


def attention_choice(context: Context) -> None:
    """Compare the kernel that torch chooses with the one that rehearsal and plan believe in, and name what runs."""
    from hlat.runtime.backend.base import AttentionHeads
    from hlat.runtime.backend.device import configure_numerics
    from hlat.runtime.backend.table import backend_of

    device, rows = torch.device(context.device), {}
    for deterministic in (True, False):
        configure_numerics(device, deterministic)
        for width in (64, 128, 256):
            for kv in (1, 4):
                for dtype in (torch.bfloat16, torch.float32):
                    backend, heads = backend_of(device), AttentionHeads(dtype, width, kv < 4)
                    chosen = backend.attention_kernel(heads, deterministic, device).name
                    believed = backend._expected_attention(heads, deterministic, device)
                    case = f"width {width}, {kv} of 4 kv heads, {dtype}, {'' if deterministic else 'not '}deterministic"
                    rows[case] = [chosen, believed, _running(context, kv, width, dtype) if width == 128 else []]
    wrong = {case: row for case, row in rows.items() if row[0] != row[1]}
    context.found({"attention: chosen, believed, running": rows})
    context.check("torch chooses the attention kernels that plans count", not wrong or context.device == "cpu", wrong)


def _running(context: Context, kv: int, width: int, dtype: torch.dtype) -> list[str]:
    """Return the names of the slowest kernels of causal attention, forward and backward."""
    from torch.profiler import profile

    length = 16 if context.tiny else 1024
    q = torch.randn(1, 4, length, width, device=context.device, dtype=dtype, requires_grad=True)
    k = torch.randn(1, kv, length, width, device=context.device, dtype=dtype, requires_grad=True)
    try:
        with profile() as running:
            F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).sum().backward()
    except RuntimeError as error:
        return [f"refused: {str(error)[:200]}"]
    events = sorted(running.key_averages(), key=lambda event: -event.self_device_time_total)
    return [event.key[:100] for event in events[:3]]
