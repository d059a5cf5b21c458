"""Attention within documents on a CPU: the fused kernel, document by document.

    q, k, v of whole rows, where each query's document begins -> pieces -> the kernel on slices -> one output

A piece is what a run of queries shares: a row, a document, and under context parallelism a chunk. Its queries attend to
the part of the document before them, all of it, and to themselves, causally: two calls where there is such a part, put
together by their log-sums (Milakov and Gimelshein 2018), so that no mask exists. The cost is that of the documents, the
sum of the squares of their lengths.

It is one operation to torch, not a function of autograd that loops: ``torch.compile`` takes it as it is, whatever the
documents. For backward it keeps q, k, v, the output and the log-sums, as the kernel on whole rows does. On a CPU
without bf16 instructions the slices are widened, see ``products.py``.

Tensor suffixes: B batch, s queries of a row, T keys of a row, H query heads, G kv heads, E head width.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hlat.model.matmul import needs_widening
from hlat.model.pointwise import accumulation_dtype

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _QueryRun(NamedTuple):
    """Queries ``start <= i < stop`` of a row, which see keys ``first <= j < own`` all, and those from ``own`` on as far
    as themselves.
    """

    row: int
    start: int
    stop: int
    first: int
    own: int

    def of_queries(self, x_BHsE: torch.Tensor) -> torch.Tensor:
        """Its part of what belongs to queries, (1, H, its queries, ...)."""
        return x_BHsE[self.row : self.row + 1, :, self.start : self.stop]

    def of_keys(self, x_BGTE: torch.Tensor) -> Iterator[tuple[torch.Tensor, bool]]:
        """Its parts of what belongs to keys, (1, G, some of them, E), each with whether it is causal."""
        row_1GTE = x_BGTE[self.row : self.row + 1]
        yield row_1GTE[:, :, self.own : self.own + self.stop - self.start], True
        if self.first < self.own:
            yield row_1GTE[:, :, self.first : self.own], False


def _query_runs(first_Bs: torch.Tensor, spans: Sequence[int]) -> Iterator[_QueryRun]:
    """All pieces, in the order of the queries."""
    batch, count = first_Bs.shape
    begins_Bs = torch.ones_like(first_Bs, dtype=torch.bool)
    begins_Bs[:, 1:] = first_Bs[:, 1:] != first_Bs[:, :-1]
    places, offset = [], 0
    for start, stop in zip(spans[::2], spans[1::2], strict=True):
        begins_Bs[:, offset] = True
        places.append(torch.arange(start, stop))
        offset += stop - start
    where_s = torch.cat(places)
    starts = begins_Bs.flatten().nonzero().squeeze(1)
    lengths = starts.diff(append=starts.new_tensor([batch * count]))
    column = starts % count
    table = (starts // count, column, column + lengths, first_Bs.flatten()[starts], where_s[column])
    yield from (_QueryRun(*row) for row in torch.stack(table, dim=1).tolist())


def _results(q_BHsE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sums, uninitialised, laid out position by position, as the kernel does it."""
    batch, heads, count, width = q_BHsE.shape
    out_BsHE = q_BHsE.new_empty((batch, count, heads, width))
    sums_BsH = q_BHsE.new_empty((batch, count, heads), dtype=accumulation_dtype(q_BHsE.dtype))
    return out_BsHE.transpose(1, 2), sums_BsH.transpose(1, 2)


def _operand(x: torch.Tensor) -> torch.Tensor:
    return x.float() if needs_widening(x) else x


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor, spans: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    out, sums = _results(q)
    for piece in _query_runs(first, spans):
        query = _operand(piece.of_queries(q))
        parts = [
            _kernel(query, _operand(keys), _operand(values), 0.0, causal)
            for (keys, causal), (values, _) in zip(piece.of_keys(k), piece.of_keys(v), strict=True)
        ]
        found, log_sum = parts[0] if len(parts) == 1 else _together(*parts)
        piece.of_queries(out).copy_(found)
        piece.of_queries(sums).copy_(log_sum)
    return out, sums


def _together(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to two sets of keys, from the attention to each."""
    log_sum = torch.logaddexp(one[1], other[1])
    out, more = (found * (part - log_sum).exp().unsqueeze(-1) for found, part in (one, other))
    return out + more, log_sum


def _attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    first: torch.Tensor,
    spans: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v. With the log-sums of all its keys the kernel's are those of the whole piece."""
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
    for piece in _query_runs(first, spans):
        entering, query, result = (_operand(piece.of_queries(x)) for x in (grad, q, out))
        keys, values, grads_k, grads_v = (piece.of_keys(x) for x in (k, v, grad_k, grad_v))
        for (key, causal), (value, _), (into_k, _), (into_v, _) in zip(keys, values, grads_k, grads_v, strict=True):
            operands = (query, _operand(key), _operand(value), result, piece.of_queries(sums))
            by_q, by_k, by_v = _kernel_backward(entering, *operands, 0.0, causal)
            piece.of_queries(grad_q).add_(by_q)
            into_k.add_(by_k)
            into_v.add_(by_v)
    return grad_q, grad_k, grad_v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, first, ctx.spans = inputs
    ctx.save_for_backward(q, k, v, *output, first)
    ctx.set_materialize_grads(False)  # nobody differentiates the log-sums


def _differentiate(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
    return *torch.ops.hlat.attend_within_documents_backward(grad, *ctx.saved_tensors, ctx.spans), None, None


_library = torch.library.Library("hlat", "FRAGMENT")
_library.define("attend_within_documents(Tensor q, Tensor k, Tensor v, Tensor first, int[] spans) -> (Tensor, Tensor)")
_library.define(
    "attend_within_documents_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, Tensor first, "
    "int[] spans) -> (Tensor, Tensor, Tensor)"
)
_library.impl("attend_within_documents", _attend, "CPU")
_library.impl("attend_within_documents_backward", _attend_backward, "CPU")
torch.library.register_fake("hlat::attend_within_documents", lambda q, k, v, first, spans: _results(q), lib=_library)
torch.library.register_fake(
    "hlat::attend_within_documents_backward",
    lambda grad, q, k, v, out, sums, first, spans: tuple(torch.empty_like(x) for x in (q, k, v)),
    lib=_library,
)
torch.library.register_autograd("hlat::attend_within_documents", _differentiate, setup_context=_keep, lib=_library)


def attend_within_documents(
    q_BHsE: torch.Tensor, k_BGTE: torch.Tensor, v_BGTE: torch.Tensor, first_Bs: torch.Tensor, spans: Sequence[int]
) -> torch.Tensor:
    """Causal softmax attention of each query to its own document.

    Args:
        q_BHsE: queries, on a CPU.
        k_BGTE, v_BGTE: keys and values of whole rows, H a multiple of G.
        first_Bs: place in the row of the first token of the query's document, int64.
        spans: start and stop of each run of places that the queries have in their row, one after another.

    Returns:
        (B, H, s, E), in the dtype of the queries, laid out position by position; softmax in fp32 or wider.
    """
    out: torch.Tensor = torch.ops.hlat.attend_within_documents(q_BHsE, k_BGTE, v_BGTE, first_Bs, spans)[0]
    return out
