"""Pointwise operations of the decoder (RMSNorm, rotary embedding, SwiGLU) with hand-written backward passes.

    rms_norm     x -> x / rms(x) * weight     saves x and one number per row; or times (1 + weight)
    rotate       x -> x rotated by position   saves no activation
    gated        gate, up -> silu(gate) * up  saves its inputs only; or another activation

    each: a function -> its autograd function -> torch.ops.hlat.NAME where ``has_kernels``, else formulas in torch

Autograd would save every intermediate (x / rms(x), silu(gate)) and would assemble the gradient of a fused projection
from separate tensors. With these functions a LLaMA layer saves almost a quarter fewer bytes for backward, and RMSNorm
on a CPU, forward and backward, takes less than half the time of ``F.rms_norm``. Statistics and rotations are computed
in fp32, or in float64 for float64 inputs; the output has the dtype of the input. Under ``torch.compile`` the plain
formulas are used: the compiler fuses them and chooses what to save.

Tensor suffixes: B batch, S positions, G groups of heads, R heads of a group, F pairs of a head (half its width), I
intermediate width; "..." any leading dimensions.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hlat.model.kernels.library import (
    Rows,
    block_rows,
    check_operand,
    check_rows,
    describe_rows,
    fields,
    has_kernels,
    operator,
    place_of_rows,
    run,
)

Mean = Callable[[torch.Tensor], torch.Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics of ``dtype`` tensors: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """Compute ``x / sqrt(mean(x ** 2) + eps) * (offset + weight)`` over the last dimension (Zhang and Sennrich 2019).

    (..., width), any floating dtype and strides, to the same shape and dtype; the weight is cast to it.
    """
    if torch.compiler.is_compiling():
        x_wide = x.to(accumulation_dtype(x.dtype))
        scale = (x_wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (x_wide * scale * _shifted(weight.to(x.dtype), offset)).to(x.dtype)
    out: torch.Tensor = _RMSNorm.apply(x, weight.to(x.dtype), eps, offset)  # type: ignore[no-untyped-call]
    return out


def _shifted(weight: torch.Tensor, offset: float) -> torch.Tensor:
    return weight + offset if offset else weight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        out: torch.Tensor
        factor = _shifted(weight, offset)  # in backward again, so that no copy is saved
        if has_kernels(x):
            out, scale = torch.ops.hlat.rms_norm(x, factor, eps)
        else:
            x_wide = x.to(accumulation_dtype(x.dtype))
            scale = x_wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
            out = (x_wide * scale).mul_(factor).to(x.dtype)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors  # once: each access recomputes what activation checkpointing dropped
        saved = x, _shifted(weight, ctx.offset), scale
        if has_kernels(x):
            return *torch.ops.hlat.rms_norm_backward(grads[0], *saved), None, None
        return *_norm_gradients(saved, grads[0], lambda sums: sums.div_(x.shape[-1])), None, None


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
    along = mean(torch.mv(product.flatten(0, -2), weight_wide).view(*product.shape[:-1], 1))
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


_WEIGHT_BLOCK_ELEMENTS = 1 << 15  # of a block whose rows share a row of partial gradients
_SMALLEST_WEIGHT_BLOCK = 64  # rows


class Norm(ctypes.Structure):
    """Arguments of ``norm``, ``norm_backward`` and ``norm_weight``."""

    _fields_ = (
        ("width", ctypes.c_int64),
        ("eps", ctypes.c_float),
        *fields(Rows, "x", "gradient"),
        *fields(ctypes.c_void_p, "weight", "out", "scale", "partial"),
        *fields(ctypes.c_int64, "block_rows", "blocks"),
    )


def _norm_results(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    check_rows("x", x)
    check_operand("weight", weight, x.dtype, x.shape[-1:], x.device)
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@operator("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", _norm_results)
def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, scale: torch.Tensor) -> None:
    """Write the output, and the reciprocal of the root mean square of each row, fp32 (..., 1)."""
    if x.numel() == 0:
        scale.fill_(eps**-0.5 if eps else torch.inf)
        return
    rows, x = describe_rows(x)
    weight = weight.contiguous()
    arguments = Norm(x.shape[-1], eps, rows, rows, weight.data_ptr(), out.data_ptr(), scale.data_ptr(), None, 0, 0)
    run("norm", x.dtype, arguments, scale.numel(), block_rows(x.shape[-1]))


def _norm_gradient_results(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    check_rows("x", x)
    check_operand("gradient", gradient, x.dtype, x.shape, x.device)
    check_operand("weight", weight, x.dtype, x.shape[-1:], x.device)
    check_operand("scale", scale, torch.float32, (*x.shape[:-1], 1), x.device)
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@operator(
    "rms_norm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
    _norm_gradient_results,
)
def _norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    by_x: torch.Tensor,
    by_weight: torch.Tensor,
) -> None:
    width, count = x.shape[-1], scale.numel()
    if x.numel() == 0:
        by_weight.zero_()
        return
    (x_rows, x), (gradient_rows, gradient) = describe_rows(x), describe_rows(gradient)
    weight, scale = weight.contiguous(), scale.contiguous()
    size = max(_SMALLEST_WEIGHT_BLOCK, _WEIGHT_BLOCK_ELEMENTS // width)
    # Each block of rows sums into a row of its own, so the bits do not depend on the threads.
    partial = torch.empty((-(-count // size), width), dtype=torch.float32)
    addresses = (tensor.data_ptr() for tensor in (weight, by_x, scale, partial))
    arguments = Norm(width, 0.0, x_rows, gradient_rows, *addresses, size, len(partial))
    run("norm_backward", x.dtype, arguments, count, size)
    arguments.out = by_weight.data_ptr()
    run("norm_weight", x.dtype, arguments, width, max(1 << 8, block_rows(len(partial))))


def rotate(x: torch.Tensor, cos_F: torch.Tensor, sin_F: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of the two halves of the first 2 F elements: (a, b) -> (a cos - b sin, b cos + a sin).

    RoPE (Su et al. 2021) with the pairs (i, i + F) of Hugging Face weights. ``x`` (..., 2 F or more) has any strides,
    fp32 tables (..., F) broadcast; the result is dense, stored position by position, in the dtype of ``x``.
    """
    if torch.compiler.is_compiling():
        dtype, half = accumulation_dtype(x.dtype), cos_F.shape[-1]
        a, b = x[..., : 2 * half].to(dtype).chunk(2, dim=-1)
        cos, sin = cos_F.to(dtype), sin_F.to(dtype)
        rotated = (each.to(x.dtype) for each in (a * cos - b * sin, b * cos + a * sin))
        return torch.cat((*rotated, x[..., 2 * half :]), dim=-1)
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
    if (width := 2 * cos_F.shape[-1]) < x.shape[-1]:
        return torch.cat((_rotated(x[..., :width], cos_F, sin_F, direction), x[..., width:]), dim=-1)
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


class Rotation(ctypes.Structure):
    """Arguments of ``rotate``, in the order of the struct in C."""

    _fields_ = (
        *fields(ctypes.c_int64, "sequence", "groups", "heads", "half"),
        *fields(ctypes.c_int64, "batch_stride", "position_stride", "group_stride", "head_stride"),
        *fields(ctypes.c_int64, "table_batch_stride", "table_stride"),
        *fields(ctypes.c_void_p, "x", "cos", "sin", "out"),
        ("direction", ctypes.c_float),
    )


def _rotate_results(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    check_rows("x", x)
    if x.dim() != 5 or x.shape[-1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, and (B, S, G, R, 2 F) is needed")
    shape = (x.shape[1], 1, 1, x.shape[-1] // 2)
    by_row = cos.dim() == 5 and cos.shape[0] in (1, x.shape[0])
    for name, table in (("cos", cos), ("sin", sin)):
        check_operand(name, table, torch.float32, (cos.shape[0], *shape) if by_row else shape, x.device)
    return x.new_empty(x.shape)


@operator("rotate(Tensor x, Tensor cos, Tensor sin, int direction) -> Tensor", _rotate_results)
def _rotate(
    x_BSGRE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int, out_BSGRE: torch.Tensor
) -> None:
    """Rotate by the angles (direction 1) or back (-1); the tables are (S, 1, 1, F) or (B, S, 1, 1, F), fp32."""
    if out_BSGRE.numel() == 0:
        return
    x_BSGRE = x_BSGRE if x_BSGRE.stride(-1) == 1 else x_BSGRE.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, sequence, groups, heads, width = x_BSGRE.shape
    half = width // 2
    per_row = sequence * half if cos.dim() == x_BSGRE.dim() and cos.shape[0] > 1 else 0
    strides, addresses = x_BSGRE.stride()[:-1], (tensor.data_ptr() for tensor in (x_BSGRE, cos, sin, out_BSGRE))
    arguments = Rotation(sequence, groups, heads, half, *strides, per_row, half, *addresses, direction)
    run("rotate", x_BSGRE.dtype, arguments, batch * sequence, block_rows(groups * heads * width))


def soft_cap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Compute ``cap * tanh(x / cap)`` in fp32 or wider, in the dtype of ``x`` (Gemma 2, arXiv 2408.00118)."""
    if cap is None:
        return x
    return (cap * torch.tanh(x.to(accumulation_dtype(x.dtype)) / cap)).to(x.dtype)


class Activation(NamedTuple):
    """Activation function of a gated feed-forward layer (Shazeer 2020): ``function(gate) * up``."""

    function: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[..., Any]  # writes the gradient by its input, from that by its output and the input
    has_kernels: bool = False
    limit: float | None = None  # if there is one, the factor is 1 + up, with up clamped to -limit .. limit

    def factor(self, up: torch.Tensor) -> torch.Tensor:
        """Return what ``function(gate)`` is multiplied by."""
        return up if self.limit is None else up.clamp(-self.limit, self.limit) + 1


SILU = Activation(F.silu, torch.ops.aten.silu_backward.grad_input, True)  # SwiGLU
# GeGLU, with the approximation by tanh (Hendrycks and Gimpel 2016)
GELU_TANH = Activation(
    partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh")
)


_ALPHA, _LIMIT = 1.702, 7.0  # of gpt-oss


def _clamped(gate: torch.Tensor) -> torch.Tensor:
    wide = gate.to(accumulation_dtype(gate.dtype)).clamp(max=_LIMIT)
    return (wide * torch.sigmoid(_ALPHA * wide)).to(gate.dtype)


def _clamped_backward(grad: torch.Tensor, gate: torch.Tensor, *, grad_input: torch.Tensor) -> None:
    wide = gate.to(accumulation_dtype(gate.dtype))
    share = torch.sigmoid(_ALPHA * wide)
    slope = share * (1 + _ALPHA * wide * (1 - share))
    grad_input.copy_((slope * grad).masked_fill_(wide > _LIMIT, 0))


# The clamped SwiGLU of gpt-oss (arXiv 2508.10925)
CLAMPED_SWIGLU = Activation(_clamped, _clamped_backward, limit=_LIMIT)


def gated(gate: torch.Tensor, up: torch.Tensor, *, activation: Activation = SILU) -> torch.Tensor:
    """Compute ``function(gate) * up``, or that times its factor, of two tensors of one shape."""
    if torch.compiler.is_compiling():
        return activation.function(gate) * activation.factor(up)
    out: torch.Tensor = _Gated.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return out


def gated_fused(gate_up: torch.Tensor, *, activation: Activation = SILU) -> torch.Tensor:
    """Compute ``function(gate) * up`` of one tensor (..., 2, I) of gate and up; returns (..., I)."""
    if torch.compiler.is_compiling():
        gate, up = gate_up.unbind(-2)
        return activation.function(gate) * activation.factor(up)
    out: torch.Tensor = _FusedGated.apply(gate_up, activation)  # type: ignore[no-untyped-call]
    return out


def _gated_forward(gate: torch.Tensor, up: torch.Tensor, *, activation: Activation) -> torch.Tensor:
    if _has_kernels(gate, up, activation):
        fused: torch.Tensor = torch.ops.hlat.swiglu(gate, up)
        return fused
    return activation.function(gate).mul_(activation.factor(up))


def _has_kernels(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> bool:
    return activation.has_kernels and has_kernels(gate) and gate.dtype == up.dtype and gate.shape == up.shape


def _gated_backward(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    grad_gate: torch.Tensor,
    grad_up: torch.Tensor,
    *,
    activation: Activation,
) -> None:
    """Write the gradients of gate and up into the given tensors, which may be slices of one."""
    if _has_kernels(gate, up, activation):
        torch.ops.hlat.swiglu_backward(grad, gate, up, grad_gate, grad_up)
        return
    torch.mul(activation.function(gate), grad, out=grad_up)
    if activation.limit is not None:
        grad_up.masked_fill_(up.abs() > activation.limit, 0)
    activation.backward(grad * activation.factor(up), gate, grad_input=grad_gate)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _gated_forward(gate, up, activation=activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate, up))
        _gated_backward(grads[0], gate, up, grad_gate, grad_up, activation=ctx.activation)
        return grad_gate, grad_up, None


class _FusedGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        return _gated_forward(*gate_up.unbind(-2), activation=activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        # One tensor for both, so that the gradient of the fused projection need not be assembled.
        out = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        _gated_backward(grads[0], *gate_up.unbind(-2), *out.unbind(-2), activation=ctx.activation)
        return out, None


class Gated(ctypes.Structure):
    """Arguments of ``swiglu`` and ``swiglu_backward``."""

    _fields_ = (("width", ctypes.c_int64), *fields(Rows, "gate", "up", "gradient", "gate_out", "up_out"))


def _swiglu_results(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    check_rows("gate", gate)
    check_operand("up", up, gate.dtype, gate.shape, gate.device)
    return gate.new_empty(gate.shape)


@operator("swiglu(Tensor gate, Tensor up) -> Tensor", _swiglu_results)
def _swiglu(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    _run_swiglu("swiglu", gate, up, out, out, out)  # without a gradient


def _check_swiglu_gradient(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, by_gate: torch.Tensor, by_up: torch.Tensor
) -> None:
    check_rows("gate", gate)
    for name, tensor in (("gradient", gradient), ("up", up), ("by_gate", by_gate), ("by_up", by_up)):
        check_operand(name, tensor, gate.dtype, gate.shape, gate.device)
    # The kernel would write into the copy that place_of_rows makes.
    if any(place_of_rows(result)[0] is not result for result in (by_gate, by_up)):
        raise ValueError(
            f"by_gate and by_up have strides {by_gate.stride()} and {by_up.stride()}, and rows without gaps in at most "
            "two merged dimensions are needed: the results are written into them"
        )


@operator(
    "swiglu_backward(Tensor gradient, Tensor gate, Tensor up, Tensor(a!) by_gate, Tensor(b!) by_up) -> ()",
    _check_swiglu_gradient,
)
def _swiglu_gradient(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, by_gate: torch.Tensor, by_up: torch.Tensor
) -> None:
    _run_swiglu("swiglu_backward", gate, up, gradient, by_gate, by_up)


def _run_swiglu(name: str, gate: torch.Tensor, *others: torch.Tensor) -> None:
    if gate.numel() == 0:
        return
    described = [describe_rows(tensor) for tensor in (gate, *others)]  # with the tensors, which C reads
    arguments, width = Gated(gate.shape[-1], *(rows for rows, _ in described)), gate.shape[-1]
    run(name, gate.dtype, arguments, gate.numel() // width, block_rows(width))
