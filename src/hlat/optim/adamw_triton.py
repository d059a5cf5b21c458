# mypy: ignore-errors
"""AdamW update of bf16 weights on GPUs, in Triton; reproduces ``hlat.optim.adamw_reference`` bit for bit.

A program updates up to 1024 consecutive elements of one line in registers: one pass over memory, 14 bytes per element
in bf16-sr. Products and sums are not fused, division and square root follow IEEE 754, and subnormals are kept.

Triton is part of torch's builds for GPUs, not of those for CPUs: only ``adamw.py`` imports this module, for GPUs. For
AMD's it is compiled by tests only, and its bits were not compared there.
Triton kernels are not typed Python, so mypy skips this file.
"""

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from triton.compiler import make_backend
from triton.runtime import driver

from hlat.optim.adamw_reference import Operands

_STOCHASTIC, _NEAREST, _KAHAN = range(3)
_ROUNDINGS = {  # rounding of the weights; True if moments are rounded stochastically
    "bf16-sr": (_STOCHASTIC, True),
    "bf16": (_NEAREST, False),
    "bf16-kahan": (_KAHAN, False),
    "bf16-long": (_NEAREST, True),
    "bf16-kahan-long": (_KAHAN, True),
}
_BLOCK = 1024  # elements of a line that a program keeps in registers
_EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}  # the second option is of NVIDIA's newer compilers


def update(parameters: Sequence[Operands], keys_2N: torch.Tensor, rounding: str) -> None:
    """Update parameters; a ``hlat.optim.adamw_reference.Kernel``."""
    keys_2N = keys_2N.contiguous()
    weights, moments = _ROUNDINGS[rounding]
    options = {} if triton.knobs.runtime.interpret else _options(driver.active.get_current_target())
    for each in parameters:
        if not each.weight.numel():
            continue
        compensation = each.exp_avg if each.compensation is None else each.compensation  # not accessed if None
        block = min(_BLOCK, triton.next_power_of_2(each.addresses.length))
        _step[(each.addresses.count, triton.cdiv(each.addresses.length, block))](
            each.weight.view(torch.int16),
            each.gradient if each.gradient.dtype == torch.float32 else each.gradient.view(torch.int16),
            each.exp_avg.view(torch.int16),
            each.exp_avg_sq.view(torch.int16),
            compensation.view(torch.int16),
            each.scalars,
            each.addresses.rows_L,
            each.addresses.columns_L,
            each.addresses.names_L,
            keys_2N,
            keys_2N.shape[1],
            each.addresses.length,
            WEIGHTS=weights,
            RANDOM_MOMENTS=moments,
            WIDE_GRADIENT=each.gradient.dtype == torch.float32,
            BLOCK=block,
            **options,
        )


@cache
def _options(target):
    # Triton refuses options that the compiler for a GPU does not have.
    known = vars(make_backend(target).parse_options({}))
    return {name: value for name, value in _EXACT.items() if name in known}


@triton.jit
def _rotate_add(first, second, COUNT: tl.constexpr):
    return ((second << COUNT) | (second >> (32 - COUNT))) ^ first


@triton.jit
def _four_rounds(first, second, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    first += second
    second = _rotate_add(first, second, A)
    first += second
    second = _rotate_add(first, second, B)
    first += second
    second = _rotate_add(first, second, C)
    first += second
    second = _rotate_add(first, second, D)
    return first, second


@triton.jit
def _threefry(key0, key1, first, second):
    key2 = key0 ^ key1 ^ 0x1BD11BDA
    first, second = _four_rounds(first + key0, second + key1, 13, 15, 26, 6)
    first, second = _four_rounds(first + key1, second + key2 + 1, 17, 29, 16, 24)
    first, second = _four_rounds(first + key2, second + key0 + 2, 13, 15, 26, 6)
    first, second = first + key0, second + key1 + 3
    first += second
    return first, _rotate_add(first, second, 17)


@triton.jit
def _widen(stored):
    return (stored.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _stochastic(value, random16):
    """Round like ``hlat.precision.stochastic_round``; return the bits to store."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    raised = bits + tl.where(magnitude < 0x7F7F0000, random16, 0).to(tl.uint32)
    rounded = tl.where(magnitude > 0x7F800000, 0x7FC00000, raised).to(tl.uint32)
    return (rounded >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def _nearest(value):
    """Round to nearest even; return the bits to store."""
    bits = value.to(tl.uint32, bitcast=True)
    raised = bits + 0x7FFF + ((bits >> 16) & 1)
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, raised).to(tl.uint32)
    return (rounded >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def _step(
    weight_ptr,
    gradient_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    compensation_ptr,
    scalars_ptr,
    rows_ptr,
    columns_ptr,
    names_ptr,
    keys_ptr,
    name_count,
    length,
    WEIGHTS: tl.constexpr,
    RANDOM_MOMENTS: tl.constexpr,
    WIDE_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < length
    # A parameter may have more than 2^31 elements.
    at = line.to(tl.int64) * length + offset
    decay, step_size = tl.load(scalars_ptr), tl.load(scalars_ptr + 1)
    one_minus_beta1, beta2, one_minus_beta2 = (
        tl.load(scalars_ptr + 2),
        tl.load(scalars_ptr + 3),
        tl.load(scalars_ptr + 4),
    )
    inverse_bias2, eps, scale = tl.load(scalars_ptr + 5), tl.load(scalars_ptr + 6), tl.load(scalars_ptr + 7)

    w = _widen(tl.load(weight_ptr + at, mask=inside, other=0))
    g = tl.load(gradient_ptr + at, mask=inside, other=0)
    g = g * scale if WIDE_GRADIENT else _widen(_nearest(_widen(g) * scale))
    m = _widen(tl.load(exp_avg_ptr + at, mask=inside, other=0))
    v = _widen(tl.load(exp_avg_sq_ptr + at, mask=inside, other=0))
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    # Rounded to nearest (_rn) as IEEE 754 says: Triton's sqrt and / are approximate.
    denominator = tl.sqrt_rn(v) * inverse_bias2 + eps
    change = w * decay + tl.div_rn(m, denominator) * step_size
    name = tl.load(names_ptr + line)
    key0 = tl.load(keys_ptr + name).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys_ptr + name_count + name).to(tl.uint32, bitcast=True)
    row = tl.load(rows_ptr + line).to(tl.uint32, bitcast=True)
    column = tl.load(columns_ptr + line).to(tl.uint32, bitcast=True) + offset.to(tl.uint32)
    if RANDOM_MOMENTS:
        first, second = _threefry(key0, key1, column, row)
        tl.store(exp_avg_ptr + at, _stochastic(m, first >> 16), mask=inside)
        tl.store(exp_avg_sq_ptr + at, _stochastic(v, second & 0xFFFF), mask=inside)
        if WEIGHTS == 0:
            tl.store(weight_ptr + at, _stochastic(w - change, first & 0xFFFF), mask=inside)
    else:
        tl.store(exp_avg_ptr + at, _nearest(m), mask=inside)
        tl.store(exp_avg_sq_ptr + at, _nearest(v), mask=inside)
    if WEIGHTS == 1:
        tl.store(weight_ptr + at, _nearest(w - change), mask=inside)
    if WEIGHTS == 2:
        y = _widen(tl.load(compensation_ptr + at, mask=inside, other=0)) - change
        rounded = _nearest(w + y)
        word, _ = _threefry(key0, key1, tl.full((), 0xFFFFFFFF, tl.uint32), row)
        random16 = (word + column * 0x9E3779B9) >> 16  # hlat.precision.line_bits
        tl.store(compensation_ptr + at, _stochastic(y - (_widen(rounded) - w), random16), mask=inside)
        tl.store(weight_ptr + at, rounded, mask=inside)
