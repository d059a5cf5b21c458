"""Pointwise operations of the decoder (RMSNorm, rotary embedding, SwiGLU) with hand-written backward passes.

    rms_norm     x -> x / rms(x) * weight     saves x and one number per row
    rotate       x -> x rotated by position   saves no activation
    swiglu       gate, up -> silu(gate) * up  saves its inputs only

Autograd would save every intermediate (x / rms(x), silu(gate)) and would assemble the gradient of a fused projection
from separate tensors. With these functions a LLaMA layer saves almost a quarter fewer bytes for backward, and RMSNorm
on a CPU, forward and backward, takes less than half the time of ``F.rms_norm``. Statistics and rotations are computed
in fp32, or in float64 for float64 inputs; the output has the dtype of the input. Under ``torch.compile`` the plain
formulas are used: the compiler fuses them and chooses what to save.

Tensor suffixes: F half a head, I intermediate width; "..." any leading dimensions.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hlat.model.kernels.choice import has_kernels

Mean = Callable[[torch.Tensor], torch.Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics of ``dtype`` tensors are computed: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019).

    Args:
        x: (..., width), any floating dtype and strides.
        weight: (width,); cast to the dtype of ``x``, like the weights of matrix products.
        eps: added to the mean square.

    Returns:
        (..., width), in the dtype of ``x``.
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
    """Return the gradients of a norm by its input and weight.

    Args:
        saved: input, weight, and the reciprocal of the root mean square, (..., 1).
        grad: gradient by the output.
        mean: turns sums over the width that this process has, (..., 1), into means over the complete width.
    """
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
    """Compute ``rms_norm`` over a width of which this process has a shard.

    The mean square is that of the complete width, and so is the component of the gradient that normalisation removes.

    Args:
        x: (..., width of the shard).
        weight: (width of the shard,); cast to the dtype of ``x``.
        eps: added to the mean square.
        mean: turns the sums over the shard, (..., 1), into means over the complete width.
    """
    out: torch.Tensor = _ShardedNorm.apply(x, weight.to(x.dtype), eps, mean)  # type: ignore[no-untyped-call]
    return out


class _ShardedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, mean: Mean) -> torch.Tensor:
        x_wide = x.to(accumulation_dtype(x.dtype))
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

    This is RoPE (Su et al. 2021) with the pairs (i, i + width / 2), the convention of Hugging Face weights.

    Args:
        x: (..., 2 F), any strides.
        cos_F: fp32, last dimension F; the others broadcast against those of ``x``.
        sin_F: like ``cos_F``.

    Returns:
        A new dense tensor of the shape and dtype of ``x``, stored position by position.
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
    """Return True for a tensor (B, S, G, R, 2 F) and a table of angles (B or 1, S, 1, 1, F) in fp32."""
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
    """Return True for operands of the kernels, which have one dtype and shape."""
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
        out = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        _swiglu_backward(grads[0], *gate_up.unbind(-2), *out.unbind(-2))
        return out
