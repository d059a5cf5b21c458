"""The compiled pointwise operations as operators of torch, each with an implementation for tensors without memory.

    torch.ops.hlat.NAME --CPU tensors--> blocks of rows --> ``pointwise.c``
                        --fake and meta tensors--> shapes of the results

Registered operators have a name in profiles and traces, and a rehearsal counts the memory of their results. They are
called from the autograd functions of ``hlat.model.pointwise`` and ``hlat.model.loss``, which decide what to save.

Tensor suffixes: B batch, S positions, G groups of heads, R heads of a group, F pairs of a head, N tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch

from hlat.model.kernels.library import Gated, Library, Loss, Norm, Rotation, Rows, library

_BLOCK_ELEMENTS = 1 << 14  # of a block that a thread takes: about 10 microseconds
_WEIGHT_BLOCK_ELEMENTS = 1 << 15  # of a block whose rows share a row of partial gradients
_SMALLEST_WEIGHT_BLOCK = 64  # rows

_operators = torch.library.Library("hlat", "FRAGMENT")


def _operator(schema: str, on_meta: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as an operator for CPU tensors, and another one that computes its results' shapes."""
    _operators.define(schema)
    name = schema.partition("(")[0]
    _operators.impl(name, on_meta, "Meta")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _operators.impl(name, function, "CPU")
        return function

    return register


def _library() -> Library:
    found = library()
    assert found is not None, "the caller asked is_available()"
    return found


def _block(width: int) -> int:
    return max(1, _BLOCK_ELEMENTS // max(1, width))


def _rows(x: torch.Tensor) -> tuple[Rows, torch.Tensor]:
    """Describe the rows of a tensor, and return the tensor that has them: a copy if its strides are too irregular."""
    width = x.shape[-1]
    if x.is_contiguous():
        return Rows(x.data_ptr(), 1, width, 0), x
    dimensions = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size != 1]
    merged: list[tuple[int, int]] = []
    for size, stride in dimensions:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > 2 or (width > 1 and x.stride(-1) != 1):
        return _rows(x.contiguous())
    (_, outer), (inner, inner_stride) = ([(1, 0)] * 2 + merged)[-2:]
    return Rows(x.data_ptr(), max(1, inner), outer, inner_stride), x


def _norm_on_meta(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@_operator("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", _norm_on_meta)
def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise; returns the output and the reciprocal of the root mean square of each row, fp32 (..., 1)."""
    out, scale = _norm_on_meta(x, weight, eps)
    if x.numel() == 0:
        return out, scale.fill_(eps**-0.5 if eps else torch.inf)
    rows, x = _rows(x)
    weight = weight.contiguous()
    arguments = Norm(x.shape[-1], eps, rows, rows, weight.data_ptr(), out.data_ptr(), scale.data_ptr(), None, 0, 0)
    _library().run("norm", x.dtype, arguments, scale.numel(), _block(x.shape[-1]))
    return out, scale


def _norm_backward_on_meta(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@_operator(
    "rms_norm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
    _norm_backward_on_meta,
)
def _norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients by input and weight."""
    by_x, by_weight = _norm_backward_on_meta(gradient, x, weight, scale)
    width, count = x.shape[-1], scale.numel()
    if x.numel() == 0:
        return by_x, by_weight.zero_()
    (x_rows, x), (gradient_rows, gradient) = _rows(x), _rows(gradient)
    weight, scale = weight.contiguous(), scale.contiguous()
    size = max(_SMALLEST_WEIGHT_BLOCK, _WEIGHT_BLOCK_ELEMENTS // width)
    partial = torch.empty((-(-count // size), width), dtype=torch.float32)
    arguments = Norm(
        width,
        0.0,
        x_rows,
        gradient_rows,
        weight.data_ptr(),
        by_x.data_ptr(),
        scale.data_ptr(),
        partial.data_ptr(),
        size,
        len(partial),
    )
    _library().run("norm_backward", x.dtype, arguments, count, size)
    arguments.out = by_weight.data_ptr()
    _library().run("norm_weight", x.dtype, arguments, width, max(1 << 8, _block(len(partial))))
    return by_x, by_weight


def _rotate_on_meta(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@_operator("rotate(Tensor x, Tensor cos, Tensor sin, int direction) -> Tensor", _rotate_on_meta)
def _rotate(x_BSGRE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    """Rotate by the angles (direction 1) or back (-1); the tables are (S, 1, 1, F) or (B, S, 1, 1, F), fp32."""
    out = _rotate_on_meta(x_BSGRE, cos, sin, direction)
    if out.numel() == 0:
        return out
    x_BSGRE = x_BSGRE if x_BSGRE.stride(-1) == 1 else x_BSGRE.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, sequence, groups, heads, width = x_BSGRE.shape
    half = width // 2
    per_row = sequence * half if cos.dim() == x_BSGRE.dim() and cos.shape[0] > 1 else 0
    arguments = Rotation(
        sequence,
        groups,
        heads,
        half,
        *x_BSGRE.stride()[:-1],
        per_row,
        half,
        *(tensor.data_ptr() for tensor in (x_BSGRE, cos, sin, out)),
        direction,
    )
    _library().run("rotate", out.dtype, arguments, batch * sequence, _block(groups * heads * width))
    return out


def _swiglu_on_meta(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate.new_empty(gate.shape)


@_operator("swiglu(Tensor gate, Tensor up) -> Tensor", _swiglu_on_meta)
def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(gate) * up``."""
    out = _swiglu_on_meta(gate, up)
    if out.numel() == 0:
        return out
    (gate_rows, gate), (up_rows, up), (out_rows, out) = _rows(gate), _rows(up), _rows(out)
    width = gate.shape[-1]
    arguments = Gated(width, gate_rows, up_rows, gate_rows, out_rows, out_rows)
    _library().run("swiglu", gate.dtype, arguments, gate.numel() // width, _block(width))
    return out


def _write_nothing(*_: torch.Tensor) -> None:
    """Results of an operator that writes into its arguments."""


@_operator(
    "swiglu_backward(Tensor gradient, Tensor gate, Tensor up, Tensor(a!) by_gate, Tensor(b!) by_up) -> ()",
    _write_nothing,
)
def _swiglu_backward(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, by_gate: torch.Tensor, by_up: torch.Tensor
) -> None:
    """Write the gradients of gate and up, whose strides are those of at most two merged dimensions."""
    if gate.numel() == 0:
        return
    (gate_rows, gate), (up_rows, up), (gradient_rows, gradient) = _rows(gate), _rows(up), _rows(gradient)
    (by_gate_rows, gate_out), (by_up_rows, up_out) = _rows(by_gate), _rows(by_up)
    assert gate_out is by_gate and up_out is by_up, "results are written in place"
    width = gate.shape[-1]
    arguments = Gated(width, gate_rows, up_rows, gradient_rows, by_gate_rows, by_up_rows)
    _library().run("swiglu_backward", gate.dtype, arguments, gate.numel() // width, _block(width))


def _loss_sums_on_meta(logits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    peak, total, label = logits.new_empty((3, len(logits)), dtype=torch.float32).unbind(0)
    return peak, total, label


@_operator("cross_entropy_sums(Tensor logits, Tensor rows) -> (Tensor, Tensor, Tensor)", _loss_sums_on_meta)
def _loss_sums(logits_NV: torch.Tensor, rows_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute each token's largest logit, sum of exponentials relative to it, and logit of its label: fp32 (N,).

    Args:
        logits_NV: contiguous.
        rows_N: column of the label; outside of 0 to V - 1 if there is none, whose logit is then 0.
    """
    peak, total, label = (torch.empty(len(logits_NV)) for _ in range(3))
    _run_loss("loss_sums", logits_NV, rows_N, peak, total, label)
    return peak, total, label


@_operator("cross_entropy_gradient_(Tensor(a!) logits, Tensor rows, Tensor peak, Tensor factor) -> ()", _write_nothing)
def _loss_gradient(logits_NV: torch.Tensor, rows_N: torch.Tensor, peak_N: torch.Tensor, factor_N: torch.Tensor) -> None:
    """Overwrite logits by ``exp(logit - peak) * factor``, less 1 at the label."""
    _run_loss("loss_gradient", logits_NV, rows_N, peak_N.contiguous(), factor=factor_N.contiguous())


def _run_loss(
    name: str,
    logits_NV: torch.Tensor,
    rows_N: torch.Tensor,
    peak: torch.Tensor,
    total: torch.Tensor | None = None,
    label: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
) -> None:
    assert logits_NV.is_contiguous(), "logits are the result of a product"
    rows_N = rows_N.contiguous()
    tensors = (logits_NV, rows_N, peak, total, label, factor)
    width = logits_NV.shape[1]
    arguments = Loss(width, *(None if tensor is None else tensor.data_ptr() for tensor in tensors))
    if logits_NV.numel():
        _library().run(name, logits_NV.dtype, arguments, len(logits_NV), _block(width))
