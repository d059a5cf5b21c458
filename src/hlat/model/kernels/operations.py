"""The compiled pointwise operations as operators of torch, and the choice between all kernels and torch.

    a tensor, or a device --has_kernels, has_attention--> torch.ops.hlat.NAME, or the formulas in torch
    torch.ops.hlat.NAME --CPU tensors--> blocks of rows --> ``kernels.c``
                        --tensors of GPUs--> ``operations_triton.py``
                        --fake and meta tensors--> shapes of the results

Registered operators have a name in profiles and traces, and a rehearsal counts the memory of their results. They are
called from the autograd functions of ``pointwise.py`` and ``loss.py``, which decide what to save.

They pass addresses to C, so each checks its operands first, also those without memory.

Tensor suffixes: B batch, S positions, G groups of heads, R heads of a group, F pairs of a head, N tokens, V vocabulary.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from hlat.model.kernels.attention import WIDEST_HEAD
from hlat.model.kernels.library import (
    DTYPES,
    Gated,
    Library,
    Loss,
    Norm,
    Rotation,
    Rows,
    check_operand,
    is_available,
    library,
)
from hlat.runtime.backend.base import TORCH, Backend
from hlat.runtime.backend.table import backend_of, types_with
from hlat.runtime.distributed.join import in_fake_world

_BLOCK_ELEMENTS = 1 << 14  # of a block that a thread takes: about 10 microseconds
_WEIGHT_BLOCK_ELEMENTS = 1 << 15  # of a block whose rows share a row of partial gradients
_SMALLEST_WEIGHT_BLOCK = 64  # rows

_TRITON = "triton"
_TRITON_TYPES = types_with(lambda backend: backend.pointwise_kernels == _TRITON)
OPERATORS: dict[str, Callable[..., Any]] = {}
"""Names of the operators: the implementation of each for tensors without memory."""
_operators = torch.library.Library("hlat", "FRAGMENT")


def _operator(schema: str, on_meta: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as an operator for CPU tensors, and another one for tensors without memory."""
    _operators.define(schema)
    name = schema.partition("(")[0]
    OPERATORS[name] = on_meta
    # ``on_meta`` checks the operands and allocates the results. Torch calls it too if only some operands have memory.
    _operators.impl(name, on_meta, "Meta")
    torch.library.impl(f"hlat::{name}", _TRITON_TYPES, in_triton(name, on_meta), lib=_operators)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _operators.impl(name, function, "CPU")
        return function

    return register


def in_triton(name: str, on_meta: Callable[..., Any]) -> Callable[..., Any]:
    """Return the implementation of an operator in Triton: ``on_meta`` checks and allocates, a namesake computes."""

    def run(*operands: Any) -> Any:
        results = on_meta(*operands)
        written = () if results is None else results if isinstance(results, tuple) else (results,)
        # Imported by the first call: only CUDA builds of torch have Triton.
        getattr(import_module("hlat.model.kernels.operations_triton"), name)(*operands, *written)
        return results

    return run


def _library() -> Library:
    found = library()
    assert found is not None, "the caller asked is_available()"
    return found


def _check_rows(name: str, x: torch.Tensor) -> None:
    # ``x`` has the rows: the other operands are compared with it.
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} is {x.dtype}, and one of {', '.join(map(str, DTYPES))} is needed")
    if x.dim() == 0:
        raise ValueError(f"{name} is a single number, and rows of a last dimension are needed")


def _block(width: int) -> int:
    return max(1, _BLOCK_ELEMENTS // max(1, width))


def place_of_rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Describe where the rows of a tensor begin, or of a copy if its strides are too irregular: the tensor comes first.

    Then ``inner``, ``outer_stride`` and ``inner_stride``: ``inner`` rows follow each other at one stride, and such
    groups of rows at the other.
    """
    width = x.shape[-1]
    if x.is_contiguous():
        return x, 1, width, 0
    dimensions = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size != 1]
    merged: list[tuple[int, int]] = []
    for size, stride in dimensions:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > 2 or (width > 1 and x.stride(-1) != 1):
        return place_of_rows(x.contiguous())
    (_, outer), (inner, inner_stride) = ([(1, 0)] * 2 + merged)[-2:]
    return x, max(1, inner), outer, inner_stride


def _rows(x: torch.Tensor) -> tuple[Rows, torch.Tensor]:
    """Describe the rows of a tensor for C, and return the tensor that has them."""
    x, *place = place_of_rows(x)
    return Rows(x.data_ptr(), *place), x


def _norm_on_meta(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    _check_rows("x", x)
    check_operand("weight", weight, x.dtype, x.shape[-1:], x.device)
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
    _check_rows("x", x)
    check_operand("gradient", gradient, x.dtype, x.shape, x.device)
    check_operand("weight", weight, x.dtype, x.shape[-1:], x.device)
    check_operand("scale", scale, torch.float32, (*x.shape[:-1], 1), x.device)
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@_operator(
    "rms_norm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
    _norm_backward_on_meta,
)
def _norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    by_x, by_weight = _norm_backward_on_meta(gradient, x, weight, scale)
    width, count = x.shape[-1], scale.numel()
    if x.numel() == 0:
        return by_x, by_weight.zero_()
    (x_rows, x), (gradient_rows, gradient) = _rows(x), _rows(gradient)
    weight, scale = weight.contiguous(), scale.contiguous()
    size = max(_SMALLEST_WEIGHT_BLOCK, _WEIGHT_BLOCK_ELEMENTS // width)
    # Each block of rows sums into a row of its own, so the bits do not depend on the threads.
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
    _check_rows("x", x)
    if x.dim() != 5 or x.shape[-1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, and (B, S, G, R, 2 F) is needed")
    shape = (x.shape[1], 1, 1, x.shape[-1] // 2)
    by_row = cos.dim() == 5 and cos.shape[0] in (1, x.shape[0])
    for name, table in (("cos", cos), ("sin", sin)):
        check_operand(name, table, torch.float32, (cos.shape[0], *shape) if by_row else shape, x.device)
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
    _check_rows("gate", gate)
    check_operand("up", up, gate.dtype, gate.shape, gate.device)
    return gate.new_empty(gate.shape)


@_operator("swiglu(Tensor gate, Tensor up) -> Tensor", _swiglu_on_meta)
def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    out = _swiglu_on_meta(gate, up)
    if out.numel() == 0:
        return out
    (gate_rows, gate), (up_rows, up), (out_rows, out) = _rows(gate), _rows(up), _rows(out)
    width = gate.shape[-1]
    arguments = Gated(width, gate_rows, up_rows, gate_rows, out_rows, out_rows)
    _library().run("swiglu", gate.dtype, arguments, gate.numel() // width, _block(width))
    return out


def _swiglu_backward_on_meta(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, by_gate: torch.Tensor, by_up: torch.Tensor
) -> None:
    _check_rows("gate", gate)
    for name, tensor in (("gradient", gradient), ("up", up), ("by_gate", by_gate), ("by_up", by_up)):
        check_operand(name, tensor, gate.dtype, gate.shape, gate.device)
    # The kernel would write into the copy that place_of_rows makes.
    if any(place_of_rows(result)[0] is not result for result in (by_gate, by_up)):
        raise ValueError(
            f"by_gate and by_up have strides {by_gate.stride()} and {by_up.stride()}, and rows without gaps in at most "
            "two merged dimensions are needed: the results are written into them"
        )


@_operator(
    "swiglu_backward(Tensor gradient, Tensor gate, Tensor up, Tensor(a!) by_gate, Tensor(b!) by_up) -> ()",
    _swiglu_backward_on_meta,
)
def _swiglu_backward(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, by_gate: torch.Tensor, by_up: torch.Tensor
) -> None:
    _swiglu_backward_on_meta(gradient, gate, up, by_gate, by_up)
    if gate.numel() == 0:
        return
    (gate_rows, gate), (up_rows, up), (gradient_rows, gradient) = _rows(gate), _rows(up), _rows(gradient)
    (by_gate_rows, _), (by_up_rows, _) = _rows(by_gate), _rows(by_up)
    width = gate.shape[-1]
    arguments = Gated(width, gate_rows, up_rows, gradient_rows, by_gate_rows, by_up_rows)
    _library().run("swiglu_backward", gate.dtype, arguments, gate.numel() // width, _block(width))


def _check_loss(logits: torch.Tensor, rows: torch.Tensor, *of_tokens: tuple[str, torch.Tensor]) -> None:
    _check_rows("logits", logits)
    if logits.dim() != 2 or not logits.is_contiguous():
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} and strides {logits.stride()}, and a contiguous matrix is needed"
        )
    check_operand("rows", rows, torch.int64, logits.shape[:1], logits.device)
    for name, tensor in of_tokens:
        check_operand(name, tensor, torch.float32, logits.shape[:1], logits.device)


def _loss_sums_on_meta(logits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_loss(logits, rows)
    peak, total, label = logits.new_empty((3, len(logits)), dtype=torch.float32).unbind(0)
    return peak, total, label


@_operator("cross_entropy_sums(Tensor logits, Tensor rows) -> (Tensor, Tensor, Tensor)", _loss_sums_on_meta)
def _loss_sums(logits_NV: torch.Tensor, rows_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each token's largest logit, sum of exponentials relative to it, and logit of its label: fp32 (N,)."""
    _check_loss(logits_NV, rows_N)
    # Without columns the largest logit is -infinity, and the sum 0
    if logits_NV.numel() == 0:
        return torch.full(rows_N.shape, -torch.inf), torch.zeros(rows_N.shape), torch.zeros(rows_N.shape)
    peak, total, label = (torch.empty(len(logits_NV)) for _ in range(3))
    # Rows outside of 0 to V - 1 have no label here; its logit is then 0.
    _run_loss("loss_sums", logits_NV, rows_N, peak, total, label)
    return peak, total, label


def _loss_gradient_on_meta(logits: torch.Tensor, rows: torch.Tensor, peak: torch.Tensor, factor: torch.Tensor) -> None:
    _check_loss(logits, rows, ("peak", peak), ("factor", factor))


@_operator(
    "cross_entropy_gradient_(Tensor(a!) logits, Tensor rows, Tensor peak, Tensor factor) -> ()", _loss_gradient_on_meta
)
def _loss_gradient(logits_NV: torch.Tensor, rows_N: torch.Tensor, peak_N: torch.Tensor, factor_N: torch.Tensor) -> None:
    """Overwrite logits by ``exp(logit - peak) * factor``, less 1 at the label."""
    _loss_gradient_on_meta(logits_NV, rows_N, peak_N, factor_N)
    _run_loss("loss_gradient", logits_NV, rows_N, peak_N.contiguous(), factor=factor_N.contiguous())


def _first_equal_on_meta(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if logits.dim() == 2:  # else the check of logits says so
        check_operand("values", values, torch.float32, logits.shape[:1], logits.device)
    found = logits.new_empty(logits.shape[:1], dtype=torch.int64)
    _check_loss(logits, found)
    return found


@_operator("first_equal(Tensor logits, Tensor values) -> Tensor", _first_equal_on_meta)
def _first_equal(logits_NV: torch.Tensor, values_N: torch.Tensor) -> torch.Tensor:
    """Find the first logit of each token that equals a value, fp32 (N,): its column, int64 (N,), or V if none does."""
    found = _first_equal_on_meta(logits_NV, values_N).fill_(logits_NV.shape[1])
    _run_loss("first_equal", logits_NV, None, values_N.contiguous(), first=found)
    return found


def _run_loss(
    name: str,
    logits_NV: torch.Tensor,
    rows_N: torch.Tensor | None,
    peak: torch.Tensor,
    total: torch.Tensor | None = None,
    label: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> None:
    rows_N = None if rows_N is None else rows_N.contiguous()
    tensors = (logits_NV, rows_N, peak, total, label, factor, first)
    width = logits_NV.shape[1]
    arguments = Loss(width, *(None if tensor is None else tensor.data_ptr() for tensor in tensors))
    if logits_NV.numel():
        _library().run(name, logits_NV.dtype, arguments, len(logits_NV), _block(width))


_LOG = logging.getLogger(__name__)


def has_kernels(x: torch.Tensor) -> bool:
    """True if the operators compute with tensors of this device and dtype."""
    # Not for code that torch.compile traces: a compiler fuses the plain formulas itself.
    return x.dtype in DTYPES and are_used_on(x.device)


def are_used_on(device: torch.device) -> bool:
    """Return True if eager models compute with the operators on a device, in the dtypes that these have."""
    backend = backend_of(device)
    return _ARE_USABLE[backend.pointwise_kernels](backend, device)


@functools.lru_cache(maxsize=16)  # asked by every operation, and the driver takes microseconds to answer
def fuses_in_triton(backend: Backend, device: torch.device) -> bool:
    """Return True if a device, which need not be on this machine, computes with the operators in Triton."""
    if backend.pointwise_kernels != _TRITON or backend.compile_obstacle(device):
        return False
    return backend.has_fast_bf16(device)


def _has_triton(backend: Backend, device: torch.device) -> bool:
    return fuses_in_triton(backend, device) and (in_fake_world() or _can_launch(backend))


@functools.cache
def _can_launch(backend: Backend) -> bool:
    compiler, problem = backend.compiler, ""
    if importlib.util.find_spec("triton") is None:
        problem = "Triton is not installed"
    elif compiler is not None and not compiler.is_available():  # Triton's launchers are compiled when they are needed
        problem = f"no {compiler.missing} found"
    if problem:
        _LOG.warning("norms, RoPE, SwiGLU and loss are computed by torch, more slowly: %s", problem)
    return not problem


_ARE_USABLE: dict[str, Callable[[Backend, torch.device], bool]] = {
    # pointwise_kernels of a backend -> function of the backend and a device
    TORCH: lambda backend, device: False,
    "c": lambda backend, device: is_available(),
    _TRITON: _has_triton,
}


def attention_is_used_on(device: torch.device | str) -> bool:
    """Return True if models compute attention by the compiled operator on a device, in its dtypes and widths."""
    if not backend_of(device).fused_attention or not is_available():
        return False
    compiled = _compiled()
    return compiled is None or compiled.attends


def builds_masks(device: torch.device | str) -> bool:
    """Return True if attention under context parallelism builds a mask in memory on a device."""
    return backend_of(device).materialises_masks and not attention_is_used_on(device)


def has_attention(device_type: str, dtype: torch.dtype, width: int) -> bool:
    """True if the operator of attention computes with heads of this dtype and width."""
    return dtype in DTYPES and width <= WIDEST_HEAD and attention_is_used_on(device_type)


# torch.compile asks it once instead of tracing it. torch.compiler.assume_constant_result sets this, and imports torch's
# compiler to do so, which takes 0.8 s of every start.
has_attention._dynamo_marked_constant = True  # type: ignore[attr-defined]


def describe_attention() -> str:
    """Name the compiled attention, as ``describe_kernels`` does."""
    return f"fused C kernel{_build()}"


def describe_kernels(device: torch.device) -> str:
    """Name what computes norms, RoPE, SwiGLU and loss of eager models on a device, for messages and checkpoints.

    The same name means the same bits: it has the compiler and the instructions of the kernels, except in a rehearsal.
    """
    backend = backend_of(device)
    if not are_used_on(device):
        return TORCH
    if backend.pointwise_kernels == _TRITON:
        version = "" if in_fake_world() else f" (Triton {backend.compiler_versions(device)['Triton']})"
        return f"fused Triton kernels{version}"
    return f"fused C kernels{_build()}"


def _build() -> str:
    compiled = _compiled()
    return "" if compiled is None else f" ({compiled.build})"


def _compiled() -> Library | None:
    # A rehearsal compiles nothing
    return None if in_fake_world() else library()
