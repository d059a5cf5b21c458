"""Operands of pointwise operations for tests: odd widths, strides of slices, and the same numbers in float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from hlat.model.pointwise import gated, gated_fused, rms_norm, rotate
from hlat.runtime.backend.base import TORCH
from hlat.runtime.backend.cpu import CpuBackend

Results = list[torch.Tensor]

UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Largest relative error of rounding to a dtype."""

WIDTHS = (1, 7, 16, 33, 64, 513, 1040)
"""Below, at and above multiples of the 16 numbers of a vector, and of the 512 of a partial sum."""


@contextmanager
def torch_only() -> Iterator[None]:
    """Compute within the block as a device without fused kernels does."""
    with patch.object(CpuBackend, "pointwise_kernels", TORCH), torch_attention():
        yield


@contextmanager
def torch_attention() -> Iterator[None]:
    """Compute attention within the block by torch's kernel, as a CPU without AVX-512 or with AMX does."""
    with patch.object(CpuBackend, "fused_attention", False):
        yield


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random numbers of both signs, a few of them large."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    values = torch.randn(*shape, generator=generator) * 2 ** torch.randn(*shape, generator=generator)
    return values.to(dtype)


def norm_case(dtype: torch.dtype, width: int, batch: int = 2) -> tuple[Callable[..., torch.Tensor], Results]:
    """RMSNorm of heads within a fused projection: rows at two strides."""
    fused = normal(batch, 5, 3, 4, width, dtype=dtype)
    return lambda x, weight: rms_norm(x[:, :, :, 1:3], weight, 1e-5), [fused, normal(width, dtype=dtype, seed=1)]


def rotate_case(dtype: torch.dtype, half: int, batch: int = 2) -> tuple[Callable[..., torch.Tensor], Results]:
    """Rotation of heads within a fused projection, with angles by position and row."""
    angles = normal(batch, 5, 1, 1, half, dtype=torch.float32, seed=1)

    def function(x: torch.Tensor) -> torch.Tensor:
        return rotate(x[:, :, :, 1:3], angles.cos(), angles.sin())

    return function, [normal(batch, 5, 3, 4, 2 * half, dtype=dtype)]


def rotate_heads_first_case(
    dtype: torch.dtype, half: int, batch: int = 2
) -> tuple[Callable[..., torch.Tensor], Results]:
    """Rotation of a tensor stored head by head, with one table for all rows."""
    angles = normal(5, half, dtype=torch.float32, seed=1)[:, None, None]

    def function(x: torch.Tensor) -> torch.Tensor:
        return rotate(x.permute(0, 3, 1, 2, 4), angles.cos(), angles.sin())

    return function, [normal(batch, 3, 2, 5, 2 * half, dtype=dtype)]


def swiglu_case(dtype: torch.dtype, width: int, batch: int = 2) -> tuple[Callable[..., torch.Tensor], Results]:
    """SwiGLU of one fused tensor."""
    return gated_fused, [normal(batch, 5, 3, 2, width, dtype=dtype)]


def separate_swiglu_case(dtype: torch.dtype, width: int, batch: int = 2) -> tuple[Callable[..., torch.Tensor], Results]:
    """SwiGLU of two tensors, one of them a transposed view."""
    return lambda gate, up: gated(gate, up.t()), [
        normal(3 * batch, width, dtype=dtype),
        normal(width, 3 * batch, dtype=dtype),
    ]


CASES = (norm_case, rotate_case, rotate_heads_first_case, swiglu_case, separate_swiglu_case)


def output_and_gradients(function: Callable[..., torch.Tensor], operands: Results) -> Results:
    """Return the output, and the gradients by all operands of its product with fixed random numbers."""
    leaves = [operand.clone().requires_grad_() for operand in operands]
    out = function(*leaves)
    gradient = normal(*out.shape, dtype=torch.bfloat16, seed=9).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors have the same bits, NaN included."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(words), b.contiguous().view(words))
