"""Attention with soft-capped scores (Gemma 2, arXiv 2408.00118) in torch, for devices whose kernels have no cap.

    scores = cap * tanh(q k / sqrt(E) / cap) -> softmax over the keys that a query sees -> values

    attend_capped          training: queries at row offsets; keys by document and window, as in ``attend_to_ranges``
    attend_capped_by_mask  generation: a mask of all scores, without gradients

Queries are computed in blocks, so that not all scores exist at once. For backward the output and the log-sum-exp are
saved, as by other kernels, and the scores of a block are computed again. Scores and sums are in fp32 or wider.

Tensor suffixes: B batch, H query heads, G kv heads, R = H / G, s queries, T keys, E head width, n queries of a block, t
keys that they may see.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hlat.model.kernels.attention import check_attention, check_gradient
from hlat.model.kernels.library import OPERATORS, operator

_BLOCK_SCORES = 1 << 22  # scores of a block: 16 MiB in fp32
_Tensors = tuple[torch.Tensor, ...]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _grouped(x_BHnE: torch.Tensor, groups: int) -> torch.Tensor:
    """(B, H, n, E) -> (B, G, R n, E): the heads of a group are computed as positions of one head."""
    out: torch.Tensor = _wide(x_BHnE).unflatten(1, (groups, -1)).flatten(2, 3)
    return out


def _capped(q_BGnE: torch.Tensor, k_BGtE: torch.Tensor, heads: int, cap: float) -> torch.Tensor:
    """Scores of each query head, (B, H, n, t)."""
    scores = torch.matmul(q_BGnE, k_BGtE.transpose(2, 3)).mul_(q_BGnE.shape[3] ** -0.5 / cap).tanh_().mul_(cap)
    out: torch.Tensor = scores.unflatten(2, (heads // q_BGnE.shape[1], -1)).flatten(1, 2)
    return out


def _blocks(
    q: torch.Tensor, keys: int, first_Bs: torch.Tensor, spans: Sequence[int], window: int
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Queries of each block, the keys that some may see, and True for those that one does not see: (B, 1, n, t)."""
    rows = max(1, _BLOCK_SCORES // max(1, q.shape[0] * q.shape[1] * keys))
    index = 0
    for start, stop in zip(spans[::2], spans[1::2], strict=True):
        for offset in range(start, stop, rows):
            end = min(stop, offset + rows)
            queries, index = slice(index, index + end - offset), index + end - offset
            lowest = max(0, offset - window + 1) if window else 0
            key_t = torch.arange(lowest, end, device=q.device)
            place_n1 = torch.arange(offset, end, device=q.device)[:, None]
            hidden = (key_t > place_n1) | (key_t < first_Bs[:, queries, None])
            if window:
                hidden |= key_t <= place_n1 - window
            yield queries, slice(lowest, end), hidden[:, None]


# ``where`` below: first, spans and window of ``attend_to_ranges``; 0 is no window


def _results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: float, *where: Any) -> _Tensors:
    check_attention(q, k, v, *where)
    batch, heads, count, width = q.shape
    out_BsHE = q.new_empty((batch, count, heads, width))  # the memory layout of other kernels: position by position
    return out_BsHE.transpose(1, 2), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@operator(
    "attend_capped(Tensor q, Tensor k, Tensor v, float cap, Tensor first, int[] spans, int window) -> (Tensor, Tensor)",
    _results,
    triton=False,
)
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cap: float, *where_and_results: Any) -> None:
    *where, out, log_sums = where_and_results
    heads, groups = q.shape[1], k.shape[1]
    for queries, keys, hidden in _blocks(q, k.shape[2], *where):
        scores = _capped(_grouped(q[:, :, queries], groups), _wide(k[:, :, keys]), heads, cap)
        scores.masked_fill_(hidden, -torch.inf)
        log_sum = scores.logsumexp(-1, keepdim=True)
        weights = _grouped(scores.sub_(log_sum).exp_(), groups)
        values = torch.matmul(weights, _wide(v[:, :, keys]))
        out[:, :, queries] = values.unflatten(2, (heads // groups, -1)).flatten(1, 2).to(out.dtype)
        log_sums[:, :, queries] = log_sum.squeeze(-1)


def _gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    _: float,
    *where: Any,
) -> _Tensors:
    check_attention(q, k, v, *where)
    check_gradient(grad, q, out, sums, torch.promote_types(q.dtype, torch.float32))
    return tuple(torch.empty_like(x) for x in (q, k, v))


@operator(
    "attend_capped_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, "
    "float cap, Tensor first, int[] spans, int window) -> (Tensor, Tensor, Tensor)",
    _gradients,
    triton=False,
)
def _attend_backward(*operands: Any) -> None:
    grad, q, k, v, out, log_sums, cap, *where, grad_q, grad_k, grad_v = operands
    heads, groups, scale = q.shape[1], k.shape[1], q.shape[3] ** -0.5
    sum_k, sum_v = (torch.zeros_like(_wide(x)) for x in (k, v))
    for queries, keys, hidden in _blocks(q, k.shape[2], *where):
        query, key, value = _grouped(q[:, :, queries], groups), _wide(k[:, :, keys]), _wide(v[:, :, keys])
        scores = _capped(query, key, heads, cap)
        # tanh' = 1 - tanh^2
        slope = (scores / cap).square_().neg_().add_(1)
        weights = scores.masked_fill_(hidden, -torch.inf).sub_(log_sums[:, :, queries, None]).exp_()
        by_out = _wide(grad[:, :, queries])
        along = (by_out * out[:, :, queries]).sum(-1, keepdim=True)
        by_out = _grouped(by_out, groups)
        sum_v[:, :, keys] += torch.matmul(_grouped(weights, groups).transpose(2, 3), by_out)
        by_weight = torch.matmul(by_out, value.transpose(2, 3)).unflatten(2, (heads // groups, -1)).flatten(1, 2)
        by_score = _grouped(by_weight.sub_(along).mul_(weights).mul_(slope), groups)
        by_query = torch.matmul(by_score, key).mul_(scale)
        grad_q[:, :, queries] = by_query.unflatten(2, (heads // groups, -1)).flatten(1, 2).to(grad_q.dtype)
        sum_k[:, :, keys] += torch.matmul(by_score.transpose(2, 3), query).mul_(scale)
    grad_k.copy_(sum_k)
    grad_v.copy_(sum_v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: _Tensors) -> None:
    q, k, v, ctx.cap, first, *ctx.others = inputs
    ctx.save_for_backward(q, k, v, *output, first)
    ctx.set_materialize_grads(False)  # the log-sum-exp is never differentiated


def _differentiate(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
    *tensors, first = ctx.saved_tensors
    by_operands = torch.ops.hlat.attend_capped_backward(grad, *tensors, ctx.cap, first, *ctx.others)
    return *by_operands, None, None, None, None


torch.library.register_autograd("hlat::attend_capped", _differentiate, setup_context=_save, lib=OPERATORS)

# The operator, as it appears in compiled graphs
CAPPED_ATTENTION: Any = torch.ops.hlat.attend_capped.default


def attend_capped(
    q_BHsE: torch.Tensor,
    k_BGTE: torch.Tensor,
    v_BGTE: torch.Tensor,
    first_Bs: torch.Tensor,
    spans: Sequence[int],
    window: int | None,
    cap: float,
) -> torch.Tensor:
    """Softmax attention with scores capped to -cap .. cap, on a CPU; other arguments as in ``attend_to_ranges``."""
    out: torch.Tensor = torch.ops.hlat.attend_capped(q_BHsE, k_BGTE, v_BGTE, cap, first_Bs, spans, window or 0)[0]
    return out


def attend_capped_by_mask(
    q_BHSE: torch.Tensor, k_BGTE: torch.Tensor, v_BGTE: torch.Tensor, mask: torch.Tensor | None, cap: float
) -> torch.Tensor:
    """Compute the same with a mask of the keys that a query sees, bool (broadcast over B, H, S, T); None for all."""
    groups, (_, heads, queries, _) = k_BGTE.shape[1], q_BHSE.shape
    rows = max(1, _BLOCK_SCORES // max(1, q_BHSE.shape[0] * heads * k_BGTE.shape[2]))
    k, v, outs = _wide(k_BGTE), _wide(v_BGTE), []
    for start in range(0, queries, rows):
        block = slice(start, start + rows)
        scores = _capped(_grouped(q_BHSE[:, :, block], groups), k, heads, cap)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., block, :], -torch.inf)
        outs.append(torch.matmul(_grouped(scores.softmax(-1), groups), v).unflatten(2, (heads // groups, -1)))
    return torch.cat(outs, dim=3).flatten(1, 2).to(q_BHSE.dtype)
