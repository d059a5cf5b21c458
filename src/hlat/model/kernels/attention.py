"""Softmax attention: operators of torch compiled from C, with a backward pass, or else torch's own kernels.

    attend: complete rows, one position, positions behind a cache
    attend_to_ranges: queries at row offsets that ``spans`` lists, to their document, or to the last keys of it

    torch.ops.hlat.attend --CPU tensors--> blocks of queries --> ``kernels/attention.c``
                          --fake and meta tensors--> shapes of the results
      backward: attend_backward --> gradient by q, and those by k and v from each query head --> attend_sums --> by k, v

Attention, its gradient by the queries and the sums over query heads are operators of their own, so that a rehearsal
counts what is between them. For backward q, k, v, the output and the log-sum-exp are saved. On a CPU without bf16
instructions torch's kernels compute with operands widened to fp32, see ``matmul.py``.

Tensor suffixes: B batch, s queries of a row, S positions, T keys of a row, H query heads, G kv heads, E head width.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hlat.config import ModelConfig, Recipe
from hlat.model.kernels.library import (
    DTYPES,
    OPERATORS,
    check_dtype,
    check_operand,
    describe_build,
    fields,
    is_available,
    library,
    operator,
    run,
)
from hlat.model.kernels.matmul import needs_widening
from hlat.precision import MODES
from hlat.runtime.backend.base import AttentionHeads, AttentionKernel
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import in_fake_world

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

WIDEST_HEAD = 256  # largest width of a head

_SIDE, _LANES = 64, 16  # of attention.c: queries and keys of a block; numbers of the longest vector
_DIMENSIONS = 4  # of queries, keys and values
_ROWS = 64  # keys whose gradients a thread adds up at a time

_Tensors = tuple[torch.Tensor, ...]


_POINTERS = ("first", "last", "key_sums", "value_sums")  # tensors that C takes without their strides


class HeadRows(ctypes.Structure):
    """A tensor (batch, heads, rows, width) by its strides in elements; a row is stored without gaps."""

    _fields_ = (("data", ctypes.c_void_p), *fields(ctypes.c_int64, "batch", "head", "row"))


class Attended(ctypes.Structure):
    """Arguments of ``attend``, ``attend_backward`` and ``attend_sums``."""

    _fields_ = (
        *fields(ctypes.c_int64, "heads", "groups", "queries", "keys", "width", "padded_keys", "padded_width"),
        ("scale", ctypes.c_float),
        *fields(ctypes.c_void_p, *_POINTERS[:2]),
        *fields(HeadRows, "q", "k", "v", "out", "gradient", "by_q", "by_k", "by_v", "log_sums"),
        *fields(ctypes.c_void_p, *_POINTERS[2:]),
    )


def by_position(x_BHsE: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor of this shape that is stored position by position, as the projections read and write it."""
    batch, heads, count, width = x_BHsE.shape
    return x_BHsE.new_empty((batch, count, heads, width)).transpose(1, 2)


def head_sums_shape(batch: int, heads: int, keys: int, width: int) -> tuple[int, int, int, int]:
    """Return the shape of the gradients by keys, and of those by values, from each query head: complete blocks."""
    return batch, heads, -(-keys // _SIDE) * _SIDE, -(-width // _LANES) * _LANES


def check_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor | None, spans: Sequence[int], window: int
) -> None:
    """Raise TypeError or ValueError if operands of an attention to ranges of keys are not what its kernel needs."""
    for name, x in (("q", q), ("k", k)):
        if x.dim() != _DIMENSIONS:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, and (batch, heads, rows, width) is needed")
    (batch, heads, queries, width), (groups, keys) = q.shape, k.shape[1:3]
    check_operand("k", k, q.dtype, (batch, groups, keys, width), q.device)
    check_operand("v", v, q.dtype, k.shape, q.device)
    if not width or not groups or heads % groups:
        raise ValueError(f"k has shape {tuple(k.shape)}, and heads of which {heads} is a multiple are needed")
    ranges = [0, *spans, keys]
    if len(spans) % 2 or ranges != sorted(ranges) or sum(spans[1::2]) - sum(spans[::2]) != queries or window < 0:
        raise ValueError(f"spans are {list(spans)}, and {queries} ascending offsets within {keys} keys are needed")
    if first is not None:
        check_operand("first", first, torch.int64, (batch, queries), q.device)


def check_gradient(
    grad: torch.Tensor, q: torch.Tensor, out: torch.Tensor, log_sums: torch.Tensor, wide: torch.dtype
) -> None:
    """Raise TypeError or ValueError if results of an attention, or their gradient, do not belong to its queries."""
    for name, x in (("grad", grad), ("out", out)):
        check_operand(name, x, q.dtype, q.shape, q.device)
    check_operand("sums", log_sums, wide, q.shape[:3], q.device)


def _check_kernel(name: str, x: torch.Tensor) -> None:
    check_dtype(name, x)
    if x.dim() != _DIMENSIONS or x.shape[-1] > WIDEST_HEAD:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, and (batch, heads, rows, width <= {WIDEST_HEAD}) is needed"
        )


def key_ranges(first: torch.Tensor | None, spans: Sequence[int], window: int, batch: int) -> _Tensors:
    """First and last key of each query, int32 (B, s); arguments as in ``attend_to_ranges``, 0 is no window."""
    pairs = zip(spans[::2], spans[1::2], strict=True)
    last_s = torch.cat([torch.arange(start, stop, dtype=torch.int32) for start, stop in pairs] or [torch.empty(0)])
    last = last_s.to(torch.int32).expand(batch, -1).contiguous()
    if first is not None and bool(((first < 0) | (first > last)).any()):  # addresses follow from it
        raise ValueError("first has an offset before its row or behind its query, and that of a document is needed")
    begin = torch.zeros_like(last) if first is None else first.to(torch.int32)
    if window:
        begin = begin.maximum(last - (window - 1))
    return begin.contiguous(), last


def _readable(*tensors: torch.Tensor) -> _Tensors:
    # The kernel wants a last dimension without gaps; most tensors have it, and are not copied.
    return tuple(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors)


def _arguments(heads: int, queries: int, shape: torch.Size, **tensors: torch.Tensor) -> Attended:
    """Describe the operands for C; ``shape`` is that of the keys, and the caller keeps the tensors."""
    _, groups, keys, width = shape
    described = {
        name: x.data_ptr() if name in _POINTERS else HeadRows(x.data_ptr(), *x.stride()[:3])
        for name, x in tensors.items()
    }
    padded = head_sums_shape(1, 1, keys, width)[2:]
    return Attended(heads, groups, queries, keys, width, *padded, width**-0.5, **described)


# ``where`` below: first, spans and window of ``attend_to_ranges``; 0 is no window


def _results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *where: Any) -> _Tensors:
    """Output and log-sum-exp, fp32 (B, H, s), without values."""
    _check_kernel("q", q)
    check_attention(q, k, v, *where)
    return by_position(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@operator(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? first, int[] spans, int window) -> (Tensor, Tensor)",
    _results,
    triton=False,
)
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *where_and_results: Any) -> None:
    first, spans, window, out, log_sums = where_and_results
    q, k, v = _readable(q, k, v)
    begin, last = key_ranges(first, spans, window, len(q))
    tensors = {"q": q, "k": k, "v": v, "first": begin, "last": last, "out": out, "log_sums": log_sums}
    _, heads, queries, _ = q.shape
    blocks = -(-queries // _SIDE)
    run("attend", q.dtype, _arguments(heads, queries, k.shape, **tensors), len(q) * heads * blocks, 1)


def _gradients(*operands: Any) -> _Tensors:
    grad, q, k, v, out, log_sums, *where = operands
    """The gradient by q, and those by k and v from each query head: fp32, in complete blocks and vectors; no values."""
    _check_kernel("q", q)
    check_attention(q, k, v, *where)
    check_gradient(grad, q, out, log_sums, torch.float32)
    shape = head_sums_shape(*q.shape[:2], *k.shape[2:])
    return by_position(q), *(q.new_empty(shape, dtype=torch.float32) for _ in range(2))


@operator(
    "attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, Tensor? first, int[] spans, "
    "int window) -> (Tensor, Tensor, Tensor)",
    _gradients,
    triton=False,
)
def _attend_backward(*operands: Any) -> None:
    *read, log_sums, first, spans, window, by_q, key_sums, value_sums = operands
    grad, q, k, v, out = _readable(*read)
    begin, last = key_ranges(first, spans, window, len(q))
    tensors = {"q": q, "k": k, "v": v, "first": begin, "last": last, "out": out, "gradient": grad, "log_sums": log_sums}
    tensors |= {"by_q": by_q, "key_sums": key_sums, "value_sums": value_sums}
    _, heads, queries, _ = q.shape
    run("attend_backward", q.dtype, _arguments(heads, queries, k.shape, **tensors), len(q) * heads, 1)


def _sums(key_sums: torch.Tensor, value_sums: torch.Tensor, k: torch.Tensor) -> _Tensors:
    _check_kernel("k", k)
    heads = key_sums.shape[1] if key_sums.dim() == _DIMENSIONS else 0
    if not k.shape[1] or not heads or heads % k.shape[1]:
        raise ValueError(f"key_sums has shape {tuple(key_sums.shape)}, and a multiple of {k.shape[1]} heads is needed")
    for name, sums in (("key_sums", key_sums), ("value_sums", value_sums)):
        check_operand(name, sums, torch.float32, head_sums_shape(len(k), heads, *k.shape[2:]), k.device)
    return by_position(k), by_position(k)


@operator("attend_sums(Tensor key_sums, Tensor value_sums, Tensor k) -> (Tensor, Tensor)", _sums, triton=False)
def _attend_sums(
    key_sums: torch.Tensor, value_sums: torch.Tensor, k: torch.Tensor, by_k: torch.Tensor, by_v: torch.Tensor
) -> None:
    """Add up the gradients by k and v over the query heads of each group."""
    tensors = {"by_k": by_k, "by_v": by_v, "key_sums": key_sums, "value_sums": value_sums}
    rows = len(k) * k.shape[1] * k.shape[2]
    run("attend_sums", k.dtype, _arguments(key_sums.shape[1], 0, k.shape, **tensors), rows, _ROWS)


def differentiable(name: str, backward: Callable[..., _Tensors]) -> None:
    """Register the backward pass of an operator of attention.

    ``backward`` takes the gradient, q, k and v, the two results, and what else the operator takes. It returns the
    gradients by its first operands.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: _Tensors) -> None:
        # Only tensors may be saved; None for each among the other operands.
        ctx.operands = [None if isinstance(each, torch.Tensor) else each for each in inputs]
        ctx.places = [place for place, each in enumerate(inputs) if isinstance(each, torch.Tensor)]
        ctx.save_for_backward(*output, *(inputs[place] for place in ctx.places))
        ctx.set_materialize_grads(False)  # the log-sum-exp is never differentiated

    def differentiate(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
        out, log_sums, *saved = ctx.saved_tensors
        operands = list(ctx.operands)
        for place, tensor in zip(ctx.places, saved, strict=True):
            operands[place] = tensor
        found = dict(enumerate(backward(grad, *operands[:3], out, log_sums, *operands[3:])))
        return tuple(found.get(place) if place in ctx.places else None for place in range(len(operands)))

    torch.library.register_autograd(f"hlat::{name}", differentiate, setup_context=save, lib=OPERATORS)


def _differentiate(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *others: Any) -> _Tensors:
    by_q, key_sums, value_sums = torch.ops.hlat.attend_backward(grad, q, k, *others)
    return by_q, *torch.ops.hlat.attend_sums(key_sums, value_sums, k)


differentiable("attend", _differentiate)

ATTENTION = torch.ops.hlat.attend.default  # the operator of compiled attention, as it appears in compiled graphs


def attend_to_ranges(
    q_BHsE: torch.Tensor,  # bf16 or fp32, on a CPU; E at most ``WIDEST_HEAD``
    k_BGTE: torch.Tensor,  # of complete rows, H a multiple of G
    v_BGTE: torch.Tensor,  # likewise
    first_Bs: torch.Tensor | None,  # row offset of the first token of each query's document, int64; None: a row is one
    spans: Sequence[int],  # start and stop of each range of row offsets of the queries, flattened, ascending
    window: int | None = None,  # keys that a query attends to at most, itself included; None for no limit
) -> torch.Tensor:
    """Causal softmax attention of queries to their row, document or window: (B, H, s, E) by position, fp32 softmax."""
    out: torch.Tensor = torch.ops.hlat.attend(q_BHsE, k_BGTE, v_BGTE, first_Bs, spans, window or 0)[0]
    return out


def attention_is_used_on(device: torch.device | str) -> bool:
    """Return True if models compute attention by the compiled operator on a device, in its dtypes and widths."""
    if not backend_of(device).fused_attention or not is_available():
        return False
    compiled = None if in_fake_world() else library()  # a rehearsal compiles nothing
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


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: "torch.Tensor | CausalBias | None" = None
) -> torch.Tensor:
    """Softmax attention, causal by the compiled operator where it is, else by torch's fused kernels.

    Args:
        q: (B, H, S, E).
        k: keys (B, G, T, E), H a multiple of G; consecutive query heads share a kv head.
        v: values (B, G, T, E).
        mask: the T positions that each query attends to, as a bool tensor or as ``causal_lower_right(S, T)``; None for
            the causal mask of S = T, or S = 1: the last one.

    Returns:
        (B, H, S, E), in the dtype of ``q``; softmax in fp32.
    """
    if q.shape[2] == 1:
        return _attend_one(q, k, v, mask)
    if (mask is None or hasattr(mask, "variant")) and has_attention(q.device.type, q.dtype, q.shape[3]):
        return attend_to_ranges(q, k, v, None, (k.shape[2] - q.shape[2], k.shape[2]))  # the last of all positions
    if not needs_widening(q):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    if mask is not None:
        out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask, enable_gqa=True)
        return out.to(q.dtype)
    causal: torch.Tensor = _WideCausalAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
    return causal


def _attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: "torch.Tensor | CausalBias | None"
) -> torch.Tensor:
    """Attend from one position: the query heads of a group are computed as positions of one head."""
    if hasattr(mask, "variant"):  # a CausalBias: the import of its class takes as long as that of torch's compiler
        mask = None  # the last position attends to all; the mask would take the heads of a group for positions
    # torch's kernel on a CPU reads (and in bf16 repacks) keys and values once for each query head, here once for a
    # group.
    grouped = q.view(*k.shape[:2], -1, q.shape[-1])  # consecutive query heads share a kv head
    if needs_widening(q):
        grouped, k, v = grouped.float(), k.float(), v.float()
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).to(q.dtype).view(q.shape)


class _WideCausalAttention(torch.autograd.Function):
    """The fused CPU kernel on widened operands; it saves the same tensors as the kernel of a CPU with bf16."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        wide, log_sum = kernel(q.float(), k.float(), v.float(), 0.0, True)
        out: torch.Tensor = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *narrow, log_sum = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        wide = kernel(grads[0].float(), *(tensor.float() for tensor in narrow), log_sum, 0.0, True)
        return tuple(grad.to(grads[0].dtype) for grad in wide)


def describe_attention() -> str:
    """Name the compiled attention, as ``describe_kernels`` does."""
    return f"fused C kernel{describe_build()}"


def attention_heads(
    model: ModelConfig, mode: str, sequence: int, *, isolate: bool = False, tensor: int = 1, context: int = 1
) -> AttentionHeads:
    """Describe the heads of one rank; ``sequence`` is all tokens of a row, ``isolate`` is ``data.isolate``."""
    # A kv head is never split: with fewer of them than tensor ranks, each rank has one.
    grouped = model.heads // tensor > max(1, model.n_kv_heads // tensor)
    limited = isolate or model.alters_softmax or model.window(sequence) is not None
    return AttentionHeads(MODES[mode].compute, model.n_head_dim, grouped, limited, context > 1, model.alters_softmax)


def recipe_heads(recipe: Recipe) -> AttentionHeads:
    """Describe the heads of one rank of a recipe with a resolved precision mode."""
    data, layout = recipe.data, recipe.parallel
    return attention_heads(
        recipe.model,
        recipe.precision.mode,
        data.sequence_length,
        isolate=data.isolate,
        tensor=layout.tensor,
        context=layout.context,
    )


def attention_kernel(heads: AttentionHeads, deterministic: bool, device: torch.device) -> AttentionKernel:
    """Return the kernel of attention in training: hlat's own where it is compiled, else that of the backend.

    Kernels of the same name have the same bits, as far as hlat decides. The device may be simulated.
    """
    if has_attention(device.type, heads.dtype, heads.head_dim) and not heads.altered:
        return AttentionKernel(describe_attention() + " within documents" * heads.limited)
    backend = backend_of(device)
    kernel = backend.attention_kernel(heads, deterministic, device)
    widened = backend.product_dtype(heads.dtype) != heads.dtype  # where bf16 would be emulated
    return replace(kernel, name=f"{kernel.name}, in fp32") if widened else kernel


def deterministic_by_default(recipe: Recipe, device: torch.device) -> bool:
    """Return ``run.deterministic=auto``: False where it takes a slower attention kernel; needs a resolved mode."""
    return backend_of(device).deterministic_by_default(recipe_heads(recipe), device)
