"""Softmax attention of queries to ranges of keys, compiled from C, as operators of torch with a backward pass.

    torch.ops.hlat.attend --CPU tensors--> blocks of queries --> ``attention.c``
                          --fake and meta tensors--> shapes of the results
      backward: attend_backward --> gradient by q, and those by k and v from each query head --> attend_sums --> by k, v

Queries stand at row offsets that ``spans`` lists, and attend to the keys of their document, or to the last ones of it,
up to themselves. Attention, its gradient by the queries and the sums over query heads are operators of their own, so
that a rehearsal counts what is between them. For backward q, k, v, the output and the log-sum-exp are saved.

Tensor suffixes: B batch, s queries of a row, T keys of a row, H query heads, G kv heads, E head width.
"""

from collections.abc import Sequence
from typing import Any

import torch

from hlat.model.kernels.library import DTYPES, Attended, HeadRows, Library, check_operand, library

WIDEST_HEAD = 256  # largest width of a head

_SIDE, _LANES = 64, 16  # of attention.c: queries and keys of a block; numbers of the longest vector
_DIMENSIONS = 4  # of queries, keys and values
_ROWS = 64  # keys whose gradients a thread adds up at a time

_Tensors = tuple[torch.Tensor, ...]


def _by_position(x_BHsE: torch.Tensor) -> torch.Tensor:
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
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} is {x.dtype}, and one of {', '.join(map(str, DTYPES))} is needed")
    if x.dim() != _DIMENSIONS or x.shape[-1] > WIDEST_HEAD:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, and (batch, heads, rows, width <= {WIDEST_HEAD}) is needed"
        )


def _results(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor | None, spans: Sequence[int], window: int
) -> _Tensors:
    """Output and log-sum-exp, fp32 (B, H, s), without values."""
    _check_kernel("q", q)
    check_attention(q, k, v, first, spans, window)
    return _by_position(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    first: torch.Tensor | None,
    spans: Sequence[int],
    window: int,
) -> _Tensors:
    """The gradient by q, and those by k and v from each query head: fp32, in complete blocks and vectors; no values."""
    _check_kernel("q", q)
    check_attention(q, k, v, first, spans, window)
    check_gradient(grad, q, out, log_sums, torch.float32)
    shape = head_sums_shape(*q.shape[:2], *k.shape[2:])
    return _by_position(q), *(q.new_empty(shape, dtype=torch.float32) for _ in range(2))


def _sums(key_sums: torch.Tensor, value_sums: torch.Tensor, k: torch.Tensor) -> _Tensors:
    _check_kernel("k", k)
    heads = key_sums.shape[1] if key_sums.dim() == _DIMENSIONS else 0
    if not k.shape[1] or not heads or heads % k.shape[1]:
        raise ValueError(f"key_sums has shape {tuple(key_sums.shape)}, and a multiple of {k.shape[1]} heads is needed")
    for name, sums in (("key_sums", key_sums), ("value_sums", value_sums)):
        check_operand(name, sums, torch.float32, head_sums_shape(len(k), heads, *k.shape[2:]), k.device)
    return _by_position(k), _by_position(k)


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


def _heads(x: torch.Tensor) -> HeadRows:
    return HeadRows(x.data_ptr(), *x.stride()[:3])


def _library() -> Library:
    found = library()
    assert found is not None and found.attends, "the caller asked attention_is_used_on()"
    return found


def _readable(*tensors: torch.Tensor) -> _Tensors:
    # The kernel wants a last dimension without gaps; most tensors have it, and are not copied.
    return tuple(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors)


def _arguments(heads: int, queries: int, k: torch.Tensor) -> Attended:
    _, groups, keys, width = k.shape
    found = Attended(heads, groups, queries, keys, width)
    found.padded_keys, found.padded_width = head_sums_shape(1, 1, keys, width)[2:]
    found.scale = width**-0.5
    return found


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> Attended:
    found = _arguments(q.shape[1], q.shape[2], k)
    found.q, found.k, found.v = _heads(q), _heads(k), _heads(v)
    found.first, found.last = first.data_ptr(), last.data_ptr()
    return found


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor | None, spans: Sequence[int], window: int
) -> _Tensors:
    out, log_sums = _results(q, k, v, first, spans, window)
    q, k, v = _readable(q, k, v)
    begin, last = key_ranges(first, spans, window, len(q))
    arguments = _attended(q, k, v, begin, last)
    arguments.out, arguments.log_sums = _heads(out), _heads(log_sums)
    blocks = -(-q.shape[2] // _SIDE)
    _library().run("attend", q.dtype, arguments, len(q) * q.shape[1] * blocks, 1)
    return out, log_sums


def _attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    first: torch.Tensor | None,
    spans: Sequence[int],
    window: int,
) -> _Tensors:
    by_q, key_sums, value_sums = _gradients(grad, q, k, v, out, log_sums, first, spans, window)
    grad, q, k, v, out = _readable(grad, q, k, v, out)
    begin, last = key_ranges(first, spans, window, len(q))
    arguments = _attended(q, k, v, begin, last)
    arguments.out, arguments.gradient, arguments.log_sums = _heads(out), _heads(grad), _heads(log_sums)
    arguments.by_q = _heads(by_q)
    arguments.key_sums, arguments.value_sums = key_sums.data_ptr(), value_sums.data_ptr()
    _library().run("attend_backward", q.dtype, arguments, len(q) * q.shape[1], 1)
    return by_q, key_sums, value_sums


def _attend_sums(key_sums: torch.Tensor, value_sums: torch.Tensor, k: torch.Tensor) -> _Tensors:
    """Add up the gradients by k and v over the query heads of each group."""
    by_k, by_v = _sums(key_sums, value_sums, k)
    arguments = _arguments(key_sums.shape[1], 0, k)
    arguments.by_k, arguments.by_v = _heads(by_k), _heads(by_v)
    arguments.key_sums, arguments.value_sums = key_sums.data_ptr(), value_sums.data_ptr()
    _library().run("attend_sums", k.dtype, arguments, len(k) * k.shape[1] * k.shape[2], _ROWS)
    return by_k, by_v


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: _Tensors) -> None:
    q, k, v, first, ctx.spans, ctx.window = inputs
    ctx.by_document = first is not None
    ctx.save_for_backward(q, k, v, *output, *([] if first is None else [first]))
    ctx.set_materialize_grads(False)  # the log-sum-exp is never differentiated


def _differentiate(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, log_sums, *rest = ctx.saved_tensors
    first = rest[0] if ctx.by_document else None
    operands = grad, q, k, v, out, log_sums, first, ctx.spans, ctx.window
    by_q, key_sums, value_sums = torch.ops.hlat.attend_backward(*operands)
    by_k, by_v = torch.ops.hlat.attend_sums(key_sums, value_sums, k)
    return by_q, by_k, by_v, None, None, None


_operators = torch.library.Library("hlat", "FRAGMENT")
_operators.define("attend(Tensor q, Tensor k, Tensor v, Tensor? first, int[] spans, int window) -> (Tensor, Tensor)")
_operators.define(
    "attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, Tensor? first, int[] spans, "
    "int window) -> (Tensor, Tensor, Tensor)"
)
_operators.define("attend_sums(Tensor key_sums, Tensor value_sums, Tensor k) -> (Tensor, Tensor)")
_operators.impl("attend", _attend, "CPU")
_operators.impl("attend_backward", _attend_backward, "CPU")
_operators.impl("attend_sums", _attend_sums, "CPU")
torch.library.register_fake("hlat::attend", _results, lib=_operators)
torch.library.register_fake("hlat::attend_backward", _gradients, lib=_operators)
torch.library.register_fake("hlat::attend_sums", _sums, lib=_operators)
torch.library.register_autograd("hlat::attend", _differentiate, setup_context=_save_for_backward, lib=_operators)

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
