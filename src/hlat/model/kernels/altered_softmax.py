"""Attention with capped scores (Gemma 2, arXiv 2408.00118) or sinks (gpt-oss, arXiv 2508.10925) in torch's operations.

    scores = cap * tanh(q k / sqrt(E) / cap) -> softmax over the keys that a query sees, and the sink -> values

    attend_altered          training: queries at row offsets; keys by document and window, as in ``attend_to_ranges``
    attend_altered_by_mask  generation: a mask of all scores, without gradients

The sink of a query head is a learned number: the score of one more key, whose value is zero.

Queries are computed in blocks, so that not all scores exist at once. For backward the output and the log-sum-exp are
saved, as by other kernels, and the scores of a block are computed again. Scores and sums are in fp32 or wider.

Tensor suffixes: B batch, H query heads, G kv heads, R = H / G, s queries, T keys, E head width, n queries of a block, t
keys that they may see.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hlat.model.kernels.attention import by_position, check_attention, check_gradient, differentiable
from hlat.model.kernels.library import check_operand, operator

_BLOCK_SCORES = 1 << 22  # scores of a block: 16 MiB in fp32
_Tensors = tuple[torch.Tensor, ...]


class AlteredSoftmax(NamedTuple):
    """Changes that attention makes to softmax of scores; None for one that it does not make."""

    sinks_H: torch.Tensor | None = None  # of query heads, any floating dtype
    cap: float | None = None  # scores are capped to -cap .. cap


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _grouped(x_BHnE: torch.Tensor, groups: int) -> torch.Tensor:
    """(B, H, n, E) -> (B, G, R n, E): the heads of a group are computed as positions of one head."""
    out: torch.Tensor = _wide(x_BHnE).unflatten(1, (groups, -1)).flatten(2, 3)
    return out


def _scores(q_BGnE: torch.Tensor, k_BGtE: torch.Tensor, heads: int, cap: float | None) -> torch.Tensor:
    """Scores of each query head, (B, H, n, t)."""
    scores = torch.matmul(q_BGnE, k_BGtE.transpose(2, 3)).mul_(q_BGnE.shape[3] ** -0.5 / (cap or 1.0))
    scores = scores if cap is None else scores.tanh_().mul_(cap)
    out: torch.Tensor = scores.unflatten(2, (heads // q_BGnE.shape[1], -1)).flatten(1, 2)
    return out


def _log_sums(scores_BHnt: torch.Tensor, sinks_H: torch.Tensor | None) -> torch.Tensor:
    """Log-sum-exp of the scores of each query and its sink, (B, H, n, 1)."""
    sums = scores_BHnt.logsumexp(-1, keepdim=True)
    return sums if sinks_H is None else torch.logaddexp(sums, sinks_H[:, None, None].to(sums.dtype))


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


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, *where: Any) -> None:
    check_attention(q, k, v, *where)
    if sinks is not None:
        check_operand("sinks", sinks, sinks.dtype, q.shape[1:2], q.device)


def _results(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, _: float | None, *where: Any
) -> _Tensors:
    _check(q, k, v, sinks, *where)
    return by_position(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@operator(
    "attend_altered(Tensor q, Tensor k, Tensor v, Tensor? sinks, float? cap, Tensor first, int[] spans, int window) "
    "-> (Tensor, Tensor)",
    _results,
    triton=False,
)
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> None:
    sinks, cap, *where, out, log_sums = others
    heads, groups = q.shape[1], k.shape[1]
    for queries, keys, hidden in _blocks(q, k.shape[2], *where):
        scores = _scores(_grouped(q[:, :, queries], groups), _wide(k[:, :, keys]), heads, cap)
        log_sum = _log_sums(scores.masked_fill_(hidden, -torch.inf), sinks)
        weights = _grouped(scores.sub_(log_sum).exp_(), groups)
        values = torch.matmul(weights, _wide(v[:, :, keys]))
        out[:, :, queries] = values.unflatten(2, (heads // groups, -1)).flatten(1, 2).to(out.dtype)
        log_sums[:, :, queries] = log_sum.squeeze(-1)


def _gradients(*operands: Any) -> _Tensors:
    grad, q, k, v, out, sums, sinks, _, *where = operands
    _check(q, k, v, sinks, *where)
    check_gradient(grad, q, out, sums, torch.promote_types(q.dtype, torch.float32))
    # An operator has a fixed number of results.
    return tuple(torch.empty_like(x) for x in (q, k, v, q.new_empty(0) if sinks is None else sinks))


@operator(
    "attend_altered_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, Tensor? sinks, "
    "float? cap, Tensor first, int[] spans, int window) -> (Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    triton=False,
)
def _attend_backward(*operands: Any) -> None:
    grad, q, k, v, out, log_sums, sinks, cap, *where, grad_q, grad_k, grad_v, grad_sinks = operands
    heads, groups, scale = q.shape[1], k.shape[1], q.shape[3] ** -0.5
    sum_k, sum_v = (torch.zeros_like(_wide(x)) for x in (k, v))
    along_BHs1 = (_wide(grad) * out).sum(-1, keepdim=True)
    if sinks is not None:  # its value is zero: a larger one only makes the other weights smaller
        share_BHs1 = (sinks[:, None, None] - log_sums[..., None]).exp_()
        grad_sinks.copy_(share_BHs1.mul_(along_BHs1).sum((0, 2, 3)).neg_())
    for queries, keys, hidden in _blocks(q, k.shape[2], *where):
        query, key, value = _grouped(q[:, :, queries], groups), _wide(k[:, :, keys]), _wide(v[:, :, keys])
        scores = _scores(query, key, heads, cap)
        # tanh' = 1 - tanh^2
        slope = None if cap is None else (scores / cap).square_().neg_().add_(1)
        weights = scores.masked_fill_(hidden, -torch.inf).sub_(log_sums[:, :, queries, None]).exp_()
        by_out = _grouped(grad[:, :, queries], groups)
        sum_v[:, :, keys] += torch.matmul(_grouped(weights, groups).transpose(2, 3), by_out)
        by_weight = torch.matmul(by_out, value.transpose(2, 3)).unflatten(2, (heads // groups, -1)).flatten(1, 2)
        by_score = by_weight.sub_(along_BHs1[:, :, queries]).mul_(weights)
        by_product = _grouped(by_score if slope is None else by_score.mul_(slope), groups)
        by_query = torch.matmul(by_product, key).mul_(scale)
        grad_q[:, :, queries] = by_query.unflatten(2, (heads // groups, -1)).flatten(1, 2).to(grad_q.dtype)
        sum_k[:, :, keys] += torch.matmul(by_product.transpose(2, 3), query).mul_(scale)
    grad_k.copy_(sum_k)
    grad_v.copy_(sum_v)


differentiable("attend_altered", torch.ops.hlat.attend_altered_backward)

# The operator, as it appears in compiled graphs
ALTERED_ATTENTION: Any = torch.ops.hlat.attend_altered.default


def attend_altered(
    q_BHsE: torch.Tensor,
    k_BGTE: torch.Tensor,
    v_BGTE: torch.Tensor,
    first_Bs: torch.Tensor,
    spans: Sequence[int],
    window: int | None,
    softmax: AlteredSoftmax,
) -> torch.Tensor:
    """Attend with another softmax, on a CPU; other arguments as in ``attend_to_ranges``."""
    attend = torch.ops.hlat.attend_altered
    out: torch.Tensor = attend(q_BHsE, k_BGTE, v_BGTE, *softmax, first_Bs, spans, window or 0)[0]
    return out


def attend_altered_by_mask(
    q_BHSE: torch.Tensor, k_BGTE: torch.Tensor, v_BGTE: torch.Tensor, mask: torch.Tensor | None, softmax: AlteredSoftmax
) -> torch.Tensor:
    """Compute the same with a mask of the keys that a query sees, bool (broadcast over B, H, S, T); None for all."""
    groups, (_, heads, queries, _) = k_BGTE.shape[1], q_BHSE.shape
    rows = max(1, _BLOCK_SCORES // max(1, q_BHSE.shape[0] * heads * k_BGTE.shape[2]))
    k, v, outs = _wide(k_BGTE), _wide(v_BGTE), []
    for start in range(0, queries, rows):
        block = slice(start, start + rows)
        scores = _scores(_grouped(q_BHSE[:, :, block], groups), k, heads, softmax.cap)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., block, :], -torch.inf)
        weights = (scores - _log_sums(scores, softmax.sinks_H)).exp()
        outs.append(torch.matmul(_grouped(weights, groups), v).unflatten(2, (heads // groups, -1)))
    return torch.cat(outs, dim=3).flatten(1, 2).to(q_BHSE.dtype)
