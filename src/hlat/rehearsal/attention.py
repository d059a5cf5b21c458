"""Attention of a device that is not here: the operators that torch would run there, on tensors without memory.

    F.scaled_dot_product_attention(q, k, v, mask) --> the backend's kernel for such heads --> its operator, as torch
        dispatches it on the device: what it returns and keeps for backward is counted like every other tensor

    kernel                keeps for backward, besides queries, keys, values and output
    flash_attention       log-sum-exp
    cudnn_attention       log-sum-exp
    efficient_attention   log-sum-exp
    overrideable          log-sum-exp, and a mask if there is one
    math                  the scores after softmax, and keys and values repeated for every query head

Torch implements a causal mask whose queries are the last of more keys (``CausalBias``, under context parallelism) in
flash and efficient attention only; for others it builds the mask.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias

from hlat.runtime.backend import torch_private
from hlat.runtime.backend.base import AttentionHeads
from hlat.runtime.backend.table import backend_of

_aten = torch.ops.aten
_plain = F.scaled_dot_product_attention
_LOWER_RIGHT = 2  # value of torch.nn.attention.bias.CausalVariant


@contextmanager
def simulated_attention(device: torch.device, deterministic: bool) -> Iterator[None]:
    """Let attention run the operator of the simulated device within the block, backward passes included.

    Args:
        device: device that the tensors report.
        deterministic: ``run.deterministic`` of the recipe.
    """

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: CausalBias | None = None, **given: bool
    ) -> torch.Tensor:
        has_prefix = attn_mask is not None
        heads = AttentionHeads(q.dtype, q.shape[3], q.shape[1] != k.shape[1], has_prefix=has_prefix)
        kernel = backend_of(device).attention_kernel(heads, deterministic, device)
        return _KERNELS[kernel.name](q, k, v, attn_mask)

    torch_private.shapes_of_overrideable_backward()
    with patch.object(F, "scaled_dot_product_attention", attend):
        yield


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: CausalBias | None) -> torch.Tensor:
    out: torch.Tensor = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return out


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: CausalBias | None) -> torch.Tensor:
    out: torch.Tensor = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]
    return out


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: CausalBias | None) -> torch.Tensor:
    if mask is None:
        out: torch.Tensor = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0]
        return out
    by_position = (tensor.transpose(1, 2) for tensor in (q, k, v))
    lengths = (None,) * 5  # bias, cumulative and maximal lengths of packed rows
    found: torch.Tensor = _aten._efficient_attention_forward(
        *by_position, *lengths, 0.0, _LOWER_RIGHT, compute_log_sumexp=True
    )[0]
    return found.transpose(1, 2)


def _overrideable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: CausalBias | None) -> torch.Tensor:
    bias = None if mask is None else _bias(mask, q)
    out: torch.Tensor = _aten._scaled_dot_product_fused_attention_overrideable(q, k, v, bias, 0.0, mask is None)[0]
    return out


def _bias(mask: CausalBias, q: torch.Tensor) -> torch.Tensor:
    """Build a mask as torch does: of booleans, then as numbers that are added to the scores, for every head."""
    allowed = mask._materialize(q.device)
    numbers = torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(~allowed, -torch.inf)
    return numbers.expand(*q.shape[:2], *numbers.shape)


def _math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: CausalBias | None) -> torch.Tensor:
    allowed = None if mask is None else mask._materialize(q.device)
    with sdpa_kernel(SDPBackend.MATH):
        return _plain(q, k, v, attn_mask=allowed, is_causal=mask is None, enable_gqa=True)


_KERNELS: dict[str, Callable[[Any, Any, Any, CausalBias | None], torch.Tensor]] = {
    # name of a backend's kernel -> the operator that torch runs for it
    "flash_attention": _flash,
    "cudnn_attention": _cudnn,
    "efficient_attention": _efficient,
    "overrideable": _overrideable,
    "math": _math,
}
