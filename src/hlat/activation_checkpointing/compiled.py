"""Activation checkpointing of compiled blocks: torch's selective checkpointing within the graph.

    names of recomputed steps -> matrix products and attention of the graph to save -> the compiler's partitioner

Hooks on saved tensors do not work in a compiled graph. There pointwise operations are fused with their neighbours, so
recomputing them is nearly free: only matrix products and attention are saved, each unless the plan recomputes it. So a
block saves what the plan says or less: never the output of a norm, of SwiGLU or of a residual addition; and q, k and v
as outputs of their product, before rotation. Attention is saved with its log-sum-exp: the kernel returns both. With
tensor parallelism the sum over ranks is saved in place of the output projection's term of it, which is a complete
sequence; so no reduction runs again, and gathers do unless their result is saved.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, repeat
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hlat.model import ATTENTION_OPERATORS

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default}
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    *ATTENTION_OPERATORS,
    flex_attention,
}

_WAIT = torch.ops._c10d_functional.wait_tensor.default  # returns the result of a collective

Contexts = Callable[[], Any]


@cache
def contexts(recomputed: frozenset[str], coalesced: bool, reduced: bool) -> Contexts:
    """Build the ``context_fn`` of ``torch.utils.checkpoint``; cached, so that equal choices share a graph."""

    def new_contexts() -> Any:
        return create_selective_checkpoint_contexts(_policy(recomputed, coalesced, reduced))

    return new_contexts


def _policy(recomputed: frozenset[str], coalesced: bool, reduced: bool) -> Callable[..., CheckpointPolicy]:
    # Forward and recomputation each run all products of the block, in the same order.
    products = {is_recompute: _product_names(coalesced) for is_recompute in (False, True)}
    unreduced: dict[bool, str] = {}  # name of a product whose sum over ranks is to follow

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            name = next(products[context.is_recompute])
            # The product is only this rank's term: what is saved is the sum over ranks that follows.
            if reduced and name == "residual":
                unreduced[context.is_recompute], name = name, ""
        elif operation is _WAIT and context.is_recompute in unreduced:
            name = unreduced.pop(context.is_recompute)
        elif operation in _ATTENTION:
            name = "attention_output"
        else:
            # Pointwise operations are fused with their neighbours: recomputing them is nearly free.
            return CheckpointPolicy.PREFER_RECOMPUTE
        saved = name and name not in recomputed
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _product_names(coalesced: bool) -> Iterator[str]:
    """Iterate over the names of a block's matrix products, in order of execution; "" for those never saved."""
    order = ("qkv", "residual", "gate_up", "") if coalesced else ("qkv",) * 3 + ("residual",) + ("gate_up",) * 2 + ("",)
    return chain(order, repeat(""))
