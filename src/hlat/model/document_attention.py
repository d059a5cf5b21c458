"""Attention within documents and sliding windows: tokens attend to the last tokens of their own document only.

    position of each token in its document, window
        -> ``DocumentMask``: for each query, the row offset at which its document starts
        -> flex, on accelerators: torch's flex attention with a block mask over 128 x 128 blocks of scores
        -> varlen, on CPUs (``attend_within_documents``)
             --compiled attention (``kernels``)--> each query's range of keys -> one output
             --torch's fused kernel--> query runs -> the kernel on slices -> one output

Either way the cost is the sum over documents and windows, and no mask of queries x keys is built. What depends on the
documents is computed once per micro-batch and shared by all layers.

A query run is a range of consecutive queries of one row, one document and, under context parallelism, one chunk. Its
queries attend to all tokens of the document before the run, and causally to each other. If there are tokens before,
that takes two kernel calls, combined by their log-sum-exp (Milakov and Gimelshein 2018). With a sliding window, queries
that do not reach the start of their document any more form short runs of their own, each a single call with the keys of
all their windows, and with a small mask that all such runs of one length share.

Varlen attention is one torch operator, not an autograd function with a loop: ``torch.compile`` does not trace into it,
whatever the documents. For backward it saves q, k, v, the output and the log-sum-exp, as the kernel on complete rows
does. On a CPU without bf16 instructions the slices are widened to fp32, see ``matmul.py``.

Tensor suffixes: B batch, s queries of a row, T keys of a row, N blocks of queries, M blocks of keys, H query heads, G
kv heads, E head width.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from hlat.model.kernels.altered_softmax import ALTERED_ATTENTION, AlteredSoftmax, attend_altered
from hlat.model.kernels.attention import (
    ATTENTION,
    attend_to_ranges,
    by_position,
    check_attention,
    check_gradient,
    differentiable,
    has_attention,
)
from hlat.model.kernels.library import operator
from hlat.model.kernels.matmul import needs_widening
from hlat.model.pointwise import accumulation_dtype
from hlat.runtime.backend.table import backend_of, is_simulated
from hlat.runtime.errors import LaunchError

Spans = tuple[tuple[int, int], ...]  # (start, stop) pairs of ranges of sequence positions, ascending

_FLEX_BLOCK = 128  # queries, and keys, of a block of scores that flex attention computes or skips


@dataclass(frozen=True)
class DocumentMask:
    """Keys that each token of a micro-batch attends to: those of its document or window, up to itself."""

    first_Bs: torch.Tensor  # row offset of the first token of each query's document, int64
    spans: Spans  # (start, stop) pairs of the row offsets of the queries, ascending
    blocks: BlockMask | None  # for flex attention; None if the kernel takes documents one by one
    window: int | None = None  # keys that a query attends to at most, itself included; None for no limit

    @classmethod
    def from_positions(cls, positions_Bs: torch.Tensor, spans: Spans, window: int | None = None) -> "DocumentMask":
        """Build the mask from each query's position within its document; see ``of_windows``."""
        return cls.of_windows(positions_Bs, spans, (window,))[window]

    @classmethod
    def of_windows(
        cls, positions_Bs: torch.Tensor, spans: Spans, windows: Collection[int | None]
    ) -> dict[int | None, "DocumentMask"]:
        """Build a mask for each window from each query's position within its document, int64 on attention's device.

        The first position of every row of the batch is 0. Spans and window are those of a mask. LaunchError: the
        device has no kernel for this.
        """
        offsets_s = row_offsets(spans, positions_Bs.device)
        first_Bs = offsets_s - positions_Bs  # one tensor for all masks: layers save it
        kernel = backend_of(positions_Bs.device).document_kernel
        if kernel is None:  # a run is refused earlier, an evaluation is not
            device_type, limits = positions_Bs.device.type, [window for window in windows if window is not None]
            otherwise = "data.isolate=true, model.attn_logit_softcapping or model.attention_sinks"
            field = f"model.sliding_window={limits[0]}" if limits else otherwise
            raise LaunchError(f"{field}: attention within documents cannot run on a {device_type} device.")
        found: dict[int | None, DocumentMask] = {}
        for window in windows:
            limited_Bs = first_Bs if window is None else first_Bs.maximum(offsets_s - window + 1)
            # Flex attention has to be compiled, which a rehearsal does not: the other kernel keeps the same tensors.
            blocks = None if is_simulated() else _MASKS[kernel.name](limited_Bs, offsets_s, spans[-1][1])
            found[window] = cls(first_Bs, spans, blocks, window)
        return found

    def attend(
        self, q_BHsE: torch.Tensor, k_BGTE: torch.Tensor, v_BGTE: torch.Tensor, softmax: AlteredSoftmax | None = None
    ) -> torch.Tensor:
        """Softmax attention: queries (B, H, s, E), keys and values (B, G, T, E) of complete rows -> (B, H, s, E)."""
        if self.blocks is None:
            ends = [end for span in self.spans for end in span]
            if softmax is not None:
                return attend_altered(q_BHsE, k_BGTE, v_BGTE, self.first_Bs, ends, self.window, softmax)
            return attend_within_documents(q_BHsE, k_BGTE, v_BGTE, self.first_Bs, ends, self.window)
        keys = self.spans[-1][1]  # no query attends to later keys
        return attend_in_blocks(q_BHsE, k_BGTE[:, :, :keys], v_BGTE[:, :, :keys], self.blocks, softmax)


def attend_in_blocks(
    q_BHsE: torch.Tensor,
    k_BGTE: torch.Tensor,
    v_BGTE: torch.Tensor,
    blocks: BlockMask,
    softmax: AlteredSoftmax | None = None,
) -> torch.Tensor:
    """Attend by flex attention: (B, H, s, E)."""
    sinks_H, cap = softmax or AlteredSoftmax()
    options = {"score_mod": None if cap is None else capped_score(cap), "block_mask": blocks, "enable_gqa": True}
    if sinks_H is None:
        out: torch.Tensor = _flex()(q_BHsE, k_BGTE, v_BGTE, **options)
        return out
    out, aux = _flex()(q_BHsE, k_BGTE, v_BGTE, **options, return_aux=AuxRequest(lse=True))
    # The share of all keys but the sink, in a softmax of both
    return (out * torch.sigmoid(aux.lse - sinks_H[:, None])[..., None]).to(out.dtype)


@cache  # one function for all layers: a compiler takes another for other code
def capped_score(cap: float) -> Callable[..., torch.Tensor]:
    """Return a function for flex attention that caps scores."""

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def row_offsets(spans: Spans, device: torch.device) -> torch.Tensor:
    """Return the row offsets of the positions in spans, (s,), int64."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])


def _flex() -> Any:
    # Uncompiled, flex attention builds all scores. Inside a compiled block the plain function is compiled with it.
    return flex_attention if torch.compiler.is_compiling() else _compiled()


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def block_mask(first_Bs: torch.Tensor, offsets_s: torch.Tensor, keys: int) -> BlockMask:
    """Build flex attention's block mask: query i of a row attends to keys ``first_Bs[row, i] <= j <= offsets_s[i]``.

    Args:
        first_Bs: row offset of the first key of each query, int64.
        offsets_s: row offset of each query, int64.
        keys: number of keys of a row, up to the last that a query attends to.
    """
    padding = -len(offsets_s) % _FLEX_BLOCK
    # Padding queries attend to no key: they make no block full, and change no minimum of first or maximum of offsets.
    first_BN = F.pad(first_Bs, (0, padding), value=keys).unflatten(1, (-1, _FLEX_BLOCK))
    offsets_N = F.pad(offsets_s, (0, padding), value=-1).unflatten(0, (-1, _FLEX_BLOCK))
    start_M = torch.arange(0, keys, _FLEX_BLOCK, device=first_Bs.device)
    last_M = start_M + _FLEX_BLOCK - 1
    # From the minimum and maximum of the limits in every block of queries: no tensor is larger than blocks x blocks. A
    # block with queries of two spans may include blocks of keys that none attends to; mask_mod is exact all the same.
    some_BNM = (first_BN.amin(2)[:, :, None] <= last_M) & (offsets_N.amax(1)[:, None] >= start_M)
    full_BNM = (first_BN.amax(2)[:, :, None] <= start_M) & (offsets_N.amin(1)[:, None] >= last_M)

    def attends(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (first_Bs[row, query] <= key) & (key <= offsets_s[query])

    partial, full = _key_blocks(some_BNM & ~full_BNM), _key_blocks(full_BNM)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=_FLEX_BLOCK, mask_mod=attends, seq_lengths=(len(offsets_s), keys)
    )


_MASKS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], BlockMask | None]] = {
    # name of a backend's document kernel -> block mask that it needs
    "varlen": lambda first_Bs, offsets_s, keys: None,
    "flex": block_mask,
}


def _key_blocks(selected_BNM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the selected key blocks of each query block, (B, 1, N), and list them first, (B, 1, N, M); int32."""
    order_BNM = selected_BNM.int().argsort(dim=2, descending=True, stable=True)
    return selected_BNM.sum(2).int()[:, None], order_BNM.int()[:, None]


_SHORTEST_BLOCK, _LONGEST_BLOCK = 32, 256  # queries of a short run: as many as the window within these limits

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _QueryRun(NamedTuple):
    """Consecutive queries of a row, document and chunk."""

    row: int  # index in the batch
    start: int  # first query, as index of the query tensor
    stop: int  # index after the last
    first: int  # row offset of the first key of the document
    # Row offset of the first query. All queries attend to keys ``first <= j < own``, and to those from ``own`` on up to
    # themselves.
    own: int
    window: int = 0  # keys that each query attends to; 0 if that is not limited within this run

    def blocks(self, window: int) -> Iterator["_QueryRun"]:
        """Split into the queries that a window (0 for none) does not limit, and short runs of those that it limits."""
        free = min(self.stop - self.start, max(0, self.first + window - self.own) if window else self.stop)
        if free:
            yield self._replace(stop=self.start + free)
        size = min(_LONGEST_BLOCK, max(_SHORTEST_BLOCK, window))
        for start in range(self.start + free, self.stop, size):
            own = self.own + start - self.start
            first = max(self.first, own - window + 1)
            yield _QueryRun(self.row, start, min(start + size, self.stop), first, own, window)

    def query_slice(self, x_BHsE: torch.Tensor) -> torch.Tensor:
        return x_BHsE[self.row : self.row + 1, :, self.start : self.stop]

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """0 for keys that a query of a limited run attends to, else -inf: (queries, keys)."""
        queries, before = self.stop - self.start, self.own - self.first
        seen = torch.ones(queries, before + queries, dtype=torch.bool).tril(before).triu(before - self.window + 1)
        return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)

    def key_slices(self, x_BGTE: torch.Tensor) -> Iterator[tuple[torch.Tensor, bool]]:
        """Slice a tensor of all keys: one or two of (1, G, keys, E), each with True if attention to it is causal."""
        row_1GTE = x_BGTE[self.row : self.row + 1]
        if self.window:
            yield row_1GTE[:, :, self.first : self.own + self.stop - self.start], False
            return
        yield row_1GTE[:, :, self.own : self.own + self.stop - self.start], True
        if self.first < self.own:
            yield row_1GTE[:, :, self.first : self.own], False


def _query_runs(first_Bs: torch.Tensor, spans: Sequence[int], window: int) -> Iterator[_QueryRun]:
    """All query runs, in the order of the queries; ``window`` is 0 for none."""
    batch, count = first_Bs.shape
    starts_run_Bs = torch.ones_like(first_Bs, dtype=torch.bool)
    starts_run_Bs[:, 1:] = first_Bs[:, 1:] != first_Bs[:, :-1]
    ranges, index = [], 0
    for start, stop in zip(spans[::2], spans[1::2], strict=True):
        starts_run_Bs[:, index] = True
        ranges.append(torch.arange(start, stop))
        index += stop - start
    offsets_s = torch.cat(ranges)
    starts = starts_run_Bs.flatten().nonzero().squeeze(1)
    lengths = starts.diff(append=starts.new_tensor([batch * count]))
    column = starts % count
    table = (starts // count, column, column + lengths, first_Bs.flatten()[starts], offsets_s[column])
    # One conversion to Python for all runs, not one for each number.
    for run in torch.stack(table, dim=1).tolist():
        yield from _QueryRun(*run).blocks(window)


def _operand(x: torch.Tensor) -> torch.Tensor:
    x = x.float() if needs_widening(x) else x
    return x if x.stride(-1) == 1 else x.contiguous()  # torch's kernel takes gaps within a row for numbers


def _masks(dtype: torch.dtype) -> Callable[[_QueryRun], torch.Tensor | None]:
    """Return a function that builds the mask of a run, or reuses it for runs with the same one; None for no mask."""
    built: dict[tuple[int, int], torch.Tensor] = {}

    def mask_of(run: _QueryRun) -> torch.Tensor | None:
        key = run.stop - run.start, run.own - run.first
        if run.window and key not in built:
            built[key] = run.mask(dtype)
        return built[key] if run.window else None

    return mask_of


# ``where`` below: first, spans and window of ``attend_to_ranges``; 0 is no window


def _results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *where: Any) -> tuple[torch.Tensor, torch.Tensor]:
    check_attention(q, k, v, *where)  # torch's kernel trusts its callers
    batch, heads, count = q.shape[:3]
    # The memory layout of torch's kernel: position by position.
    sums_BsH = q.new_empty((batch, count, heads), dtype=accumulation_dtype(q.dtype))
    return by_position(q), sums_BsH.transpose(1, 2)


def _gradients(*operands: Any) -> tuple[torch.Tensor, ...]:
    grad, q, k, v, out, sums, *where = operands
    check_attention(q, k, v, *where)
    check_gradient(grad, q, out, sums, accumulation_dtype(q.dtype))
    return tuple(torch.empty_like(x) for x in (q, k, v))


@operator(
    "attend_within_documents(Tensor q, Tensor k, Tensor v, Tensor first, int[] spans, int window) -> (Tensor, Tensor)",
    _results,
    triton=False,
)
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *where_and_results: Any) -> None:
    *where, out, log_sums = where_and_results
    mask_of = _masks(torch.float32 if needs_widening(q) else q.dtype)
    for run in _query_runs(*where):
        query, mask = _operand(run.query_slice(q)), mask_of(run)
        results = [
            _kernel(query, _operand(keys), _operand(values), 0.0, causal, attn_mask=mask)
            for (keys, causal), (values, _) in zip(run.key_slices(k), run.key_slices(v), strict=True)
        ]
        result, log_sum = results[0] if len(results) == 1 else _combine(*results)
        run.query_slice(out).copy_(result)
        run.query_slice(log_sums).copy_(log_sum)


def _combine(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention to two sets of keys, each given as output and log-sum-exp."""
    log_sum = torch.logaddexp(first[1], second[1])
    out, more = (result * (own_sum - log_sum).exp().unsqueeze(-1) for result, own_sum in (first, second))
    return out + more, log_sum


@operator(
    "attend_within_documents_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, "
    "Tensor first, int[] spans, int window) -> (Tensor, Tensor, Tensor)",
    _gradients,
    triton=False,
)
def _attend_backward(*operands: Any) -> None:
    grad, q, k, v, out, log_sums, *where, grad_q, grad_k, grad_v = operands
    for gradient in (grad_q, grad_k, grad_v):
        gradient.zero_()
    mask_of = _masks(torch.float32 if needs_widening(q) else q.dtype)
    # The log-sum-exp is over all keys of a run, so gradients from slices of its keys add up exactly.
    for run in _query_runs(*where):
        mask = mask_of(run)
        grad_out, query, result = (_operand(run.query_slice(x)) for x in (grad, q, out))
        keys, values, grads_k, grads_v = (run.key_slices(x) for x in (k, v, grad_k, grad_v))
        for (key, causal), (value, _), (sum_k, _), (sum_v, _) in zip(keys, values, grads_k, grads_v, strict=True):
            parts = (query, _operand(key), _operand(value), result, run.query_slice(log_sums))
            by_q, by_k, by_v = _kernel_backward(grad_out, *parts, 0.0, causal, attn_mask=mask)
            run.query_slice(grad_q).add_(by_q)
            sum_k.add_(by_k)
            sum_v.add_(by_v)


differentiable("attend_within_documents", torch.ops.hlat.attend_within_documents_backward)


def attend_within_documents(
    q_BHsE: torch.Tensor,
    k_BGTE: torch.Tensor,
    v_BGTE: torch.Tensor,
    first_Bs: torch.Tensor,
    spans: Sequence[int],
    window: int | None = None,
) -> torch.Tensor:
    """Causal softmax attention of each query to its own document, or to the last keys of it, on a CPU.

    Arguments as in ``attend_to_ranges``, any floating dtype; softmax in fp32 or wider.
    """
    if has_attention(q_BHsE.device.type, q_BHsE.dtype, q_BHsE.shape[3]):
        return attend_to_ranges(q_BHsE, k_BGTE, v_BGTE, first_Bs, spans, window)
    out: torch.Tensor = torch.ops.hlat.attend_within_documents(q_BHsE, k_BGTE, v_BGTE, first_Bs, spans, window or 0)[0]
    return out


# The operator of attention document by document, as it appears in compiled graphs
DOCUMENT_ATTENTION: Any = torch.ops.hlat.attend_within_documents.default
ATTENTION_OPERATORS: tuple[Any, ...] = (ATTENTION, DOCUMENT_ATTENTION, ALTERED_ATTENTION)
"""hlat's own operators of attention, as they appear in compiled graphs."""
