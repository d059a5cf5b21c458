"""The same choice for a block that goes through ``torch.compile``: torch's selective checkpointing, in its graph.

    names of what is recomputed -> which products and attentions of the graph are saved -> the compiler's partitioner

Hooks cannot look into a compiled graph. There pointwise operations are fused into what is around them, so that to
compute them again is nearly free: only products and attention are saved, each unless the plan computes it again. What
is kept is then what the plan says or less: never a norm's output, SwiGLU's product or the sum of a residual, and q, k
and v as they leave their product. Attention is saved with its log-sums: the kernel gives both or none.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, repeat
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default}
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.hlat.attend_within_documents.default,
    flex_attention,
}

Contexts = Callable[[], Any]


@cache
def contexts(recomputed: frozenset[str], coalesced: bool) -> Contexts:
    """For ``torch.utils.checkpoint.checkpoint(context_fn=...)``; the same for the same choice, so that graphs are too.

    Args:
        recomputed: names of ``hlat.model.derived.RECOMPUTABLE``.
        coalesced: whether q, k, v are one product and gate, up another.
    """

    def fresh() -> Any:
        return create_selective_checkpoint_contexts(_policy(recomputed, coalesced))

    return fresh


def _policy(recomputed: frozenset[str], coalesced: bool) -> Callable[..., CheckpointPolicy]:
    products = {again: _names(coalesced) for again in (False, True)}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            name = next(products[context.is_recompute])
        elif operation in _ATTENTION:
            name = "attention_output"
        else:
            return CheckpointPolicy.PREFER_RECOMPUTE
        kept = name and name not in recomputed
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _names(coalesced: bool) -> Iterator[str]:
    """What the products of a block give, in the order of the data; nothing that backward needs after the last."""
    order = ("qkv", "residual", "gate_up", "") if coalesced else ("qkv",) * 3 + ("residual",) + ("gate_up",) * 2 + ("",)
    return chain(order, repeat(""))
