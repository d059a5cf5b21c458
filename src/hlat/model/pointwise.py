"""Pointwise operations of the decoder (RMSNorm, rotary embedding, SwiGLU) with hand-written backward passes.

    rms_norm     x -> x / rms(x) * weight     saves x and one number per row
    rotate       x -> x rotated by position   saves no activation
    swiglu       gate, up -> silu(gate) * up  saves its inputs only

    theta, scaling -> frequencies (radians per position, one per pair) -> ``Rope``: cos and sin tables for ``rotate``

Autograd would save every intermediate (x / rms(x), silu(gate)) and would assemble the gradient of a fused projection
from separate tensors. With these functions a LLaMA layer saves almost a quarter fewer bytes for backward, and RMSNorm
on a CPU, forward and backward, takes less than half the time of ``F.rms_norm``. Statistics and rotations are computed
in fp32, or in float64 for float64 inputs; the output has the dtype of the input. Under ``torch.compile`` the plain
formulas are used: the compiler fuses them and chooses what to save.

Frequencies and tables are computed in fp32 with the operations of Hugging Face, in the same order. Weights trained
there so get the angles they were trained with: at position 100,000 an fp32 angle has an error of up to 4e-3 radians,
and another order of operations would give other errors. Tables are computed on the CPU and copied, so that every device
has the same bits.

Tensor suffixes: B batch, S positions, F pairs of a head (half its width), I intermediate width; "..." any leading
dimensions.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hlat.config import LinearScaling, Llama3Scaling, ModelConfig, RopeConfig
from hlat.model.kernels.operations import has_kernels

Mean = Callable[[torch.Tensor], torch.Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics of ``dtype`` tensors: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019).

    (..., width), any floating dtype and strides, to the same shape and dtype; the weight is cast to it.
    """
    if torch.compiler.is_compiling():
        x_wide = x.to(accumulation_dtype(x.dtype))
        scale = (x_wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (x_wide * scale * weight.to(x.dtype)).to(x.dtype)
    out: torch.Tensor = _RMSNorm.apply(x, weight.to(x.dtype), eps)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out: torch.Tensor
        if has_kernels(x):
            out, scale = torch.ops.hlat.rms_norm(x, weight, eps)
        else:
            x_wide = x.to(accumulation_dtype(x.dtype))
            scale = x_wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
            out = (x_wide * scale).mul_(weight).to(x.dtype)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: each access recomputes what activation checkpointing dropped
        if has_kernels(saved[0]):
            return *torch.ops.hlat.rms_norm_backward(grads[0], *saved), None
        return *_norm_gradients(saved, grads[0], lambda sums: sums.div_(saved[0].shape[-1])), None


def _norm_gradients(
    saved: tuple[torch.Tensor, ...], grad: torch.Tensor, mean: Mean
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by input and weight; ``mean`` turns sums over a shard, (..., 1), into means over the whole."""
    x, weight, scale = saved
    grad = grad.to(scale.dtype)
    normal = x * scale
    product = grad * normal
    weight_wide = weight.to(scale.dtype)
    # mean(grad * weight * normal): the component of the gradient along x, which normalisation removes
    along = mean(torch.matmul(product, weight_wide).unsqueeze(-1))
    grad_x = (grad * weight_wide).addcmul_(normal, along, value=-1).mul_(scale)
    grad_weight = product.flatten(0, -2).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def rms_norm_of_shard(x: torch.Tensor, weight: torch.Tensor, eps: float, mean: Mean) -> torch.Tensor:
    """Compute ``rms_norm`` of a shard of the width; ``mean`` turns its sums (..., 1) into means over all of it."""
    out: torch.Tensor = _ShardedNorm.apply(x, weight.to(x.dtype), eps, mean)  # type: ignore[no-untyped-call]
    return out


class _ShardedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, mean: Mean) -> torch.Tensor:
        x_wide = x.to(accumulation_dtype(x.dtype))
        # The mean square is that of the complete width, and so is the component of the gradient that normalisation
        # removes.
        scale = mean(x_wide.square().sum(-1, keepdim=True)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.mean = mean
        return (x_wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A copy has the term of its own query heads in its gradient, and gets its share of the sum over all of them.
        return *_norm_gradients(ctx.saved_tensors, grads[0], ctx.mean), None, None


def rotate(x: torch.Tensor, cos_F: torch.Tensor, sin_F: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of the two halves of the last dimension: (a, b) -> (a cos - b sin, b cos + a sin).

    RoPE (Su et al. 2021) with the pairs (i, i + width / 2) of Hugging Face weights. ``x`` (..., 2 F) has any strides,
    fp32 tables (..., F) broadcast; the result is dense, stored position by position, in the dtype of ``x``.
    """
    if torch.compiler.is_compiling():
        dtype = accumulation_dtype(x.dtype)
        a, b = x.to(dtype).chunk(2, dim=-1)
        cos, sin = cos_F.to(dtype), sin_F.to(dtype)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    out: torch.Tensor = _Rotate.apply(x, cos_F, sin_F)  # type: ignore[no-untyped-call]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos_F: torch.Tensor, sin_F: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_F, sin_F)
        return _rotated(x, cos_F, sin_F, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos_F, sin_F = ctx.saved_tensors
        return _rotated(grads[0], cos_F, sin_F, -1), None, None


def _rotated(x: torch.Tensor, cos_F: torch.Tensor, sin_F: torch.Tensor, direction: int) -> torch.Tensor:
    if has_kernels(x) and _is_by_position(x, cos_F) and _is_by_position(x, sin_F):
        fused: torch.Tensor = torch.ops.hlat.rotate(x, cos_F, sin_F, direction)
        return fused
    dtype = accumulation_dtype(x.dtype)
    halves = x.to(dtype).unflatten(-1, (2, -1))
    cos, sin = cos_F.to(dtype), sin_F.to(dtype)
    out = halves * cos.unsqueeze(-2)
    out[..., 0, :].addcmul_(halves[..., 1, :], sin, value=-direction)
    out[..., 1, :].addcmul_(halves[..., 0, :], sin, value=direction)
    rotated: torch.Tensor = out.flatten(-2).to(x.dtype)
    return rotated


def _is_by_position(x: torch.Tensor, table: torch.Tensor) -> bool:
    """True for a tensor (B, S, G, R, 2 F) and a table of angles (B or 1, S, 1, 1, F) in fp32."""
    shape = (1,) * (5 - table.dim()) + table.shape
    if x.dim() != 5 or 2 * shape[-1] != x.shape[-1] or table.dtype != torch.float32:
        return False
    return shape[0] in (1, x.shape[0]) and shape[1:4] == (x.shape[1], 1, 1)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(gate) * up`` (Shazeer 2020) of two tensors of one shape."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    out: torch.Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def swiglu_fused(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(gate) * up`` of one tensor (..., 2, I) of gate and up; returns (..., I)."""
    if torch.compiler.is_compiling():
        gate, up = gate_up.unbind(-2)
        return F.silu(gate) * up
    out: torch.Tensor = _FusedSwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
    return out


def _swiglu_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.hlat.swiglu(gate, up) if _are_alike(gate, up) else F.silu(gate).mul_(up)
    return out


def _are_alike(gate: torch.Tensor, up: torch.Tensor) -> bool:
    return has_kernels(gate) and gate.dtype == up.dtype and gate.shape == up.shape


def _swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, grad_gate: torch.Tensor, grad_up: torch.Tensor
) -> None:
    """Write the gradients of gate and up into the given tensors, which may be slices of one."""
    if _are_alike(gate, up):
        torch.ops.hlat.swiglu_backward(grad, gate, up, grad_gate, grad_up)
        return
    torch.mul(F.silu(gate), grad, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu_forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate, up))
        _swiglu_backward(grads[0], gate, up, grad_gate, grad_up)
        return grad_gate, grad_up


class _FusedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return _swiglu_forward(*gate_up.unbind(-2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        # One tensor for both, so that the gradient of the fused projection need not be assembled.
        out = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        _swiglu_backward(grads[0], *gate_up.unbind(-2), *out.unbind(-2))
        return out


_SMALLEST_TABLE = 1024  # positions; the table is doubled for a longer sequence


def frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Compute radians per position of each pair: fp32, shape (head_dim / 2,), on the CPU.

    Sources: Su et al. 2021 (arXiv 2104.09864) section 3.2.2; linear scaling, Chen et al. 2023 (arXiv 2306.15595); Llama
    3.1, the reference code of meta-llama/llama-models (``apply_scaling``).
    """
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / head_dim
    plain_F = 1.0 / (rope.theta**exponents_F)
    if isinstance(rope.scaling, LinearScaling):
        return plain_F / rope.scaling.factor
    if isinstance(rope.scaling, Llama3Scaling):
        return _scale_as_llama3(plain_F, rope.scaling)
    return plain_F


def _scale_as_llama3(plain_F: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Divide frequencies of long wavelengths by the factor, keep those of short ones, interpolate in between."""
    wavelength_F = 2 * math.pi / plain_F
    longest_unscaled = scaling.original_max_position / scaling.high_freq_factor
    shortest_scaled = scaling.original_max_position / scaling.low_freq_factor
    scaled_F = torch.where(wavelength_F > shortest_scaled, plain_F / scaling.factor, plain_F)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    weight_F = (scaling.original_max_position / wavelength_F - scaling.low_freq_factor) / span
    interpolated_F = (1 - weight_F) * scaled_F / scaling.factor + weight_F * scaled_F
    is_interpolated_F = ~(wavelength_F < longest_unscaled) & ~(wavelength_F > shortest_scaled)
    return torch.where(is_interpolated_F, interpolated_F, scaled_F)


Spans = tuple[tuple[int, int], ...]  # (start, stop) pairs of ranges of sequence positions, ascending


class Rope:
    """Cos and sin tables of a model, shared by all its layers."""

    def __init__(self, config: ModelConfig) -> None:
        self._rope, self._head_dim = config.rope, config.n_head_dim
        # No module buffers: each device's table is created on first use there. So tables are correct however the model
        # was built (on the meta device, by to_empty), are never saved, and stay fp32 when the model is cast.
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def tables(
        self, spans: Spans, device: torch.device, positions_BS: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up cos and sin in fp32: two tensors (positions of all spans, head_dim / 2).

        ``positions_BS`` (int64 on the device, below the last stop of ``spans``) gives (B, S, head_dim / 2) instead.
        """
        table, longest = self._tables.get(device), max(stop for _, stop in spans)
        if table is None or table[0].shape[0] < longest:
            # An entry depends on its position only, so a longer table has the same entries for earlier positions.
            table = self._build(max(_SMALLEST_TABLE, 1 << (longest - 1).bit_length()), device)
            self._tables[device] = table
        cos_SF, sin_SF = table
        if positions_BS is not None:
            return cos_SF[positions_BS], sin_SF[positions_BS]
        if len(spans) == 1:
            start, stop = spans[0]
            return cos_SF[start:stop], sin_SF[start:stop]
        return torch.cat([cos_SF[a:b] for a, b in spans]), torch.cat([sin_SF[a:b] for a, b in spans])

    def _build(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        # On the CPU, so that every device has the same bits.
        positions_S = torch.arange(length, dtype=torch.float32, device="cpu")
        angles_SF = torch.outer(positions_S, frequencies(self._rope, self._head_dim))
        return angles_SF.cos().to(device), angles_SF.sin().to(device)
