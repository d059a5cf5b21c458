"""Count of a rank's floating-point operations: matrix products and attention, by torch's formulas.

    operation, shapes -> FLOPs; a multiply-add counts as two, attention counts all pairs of positions

Recomputation in backward counts again, and so do the products of a chunked loss: these are the FLOPs that the program
executes, not those of the model (``hlat.model.derived.counts.flops_per_token``). torch has no formulas for products that add
to one of their operands in place (``addmm_``); they have as many FLOPs as those that return the sum (``addmm``).
"""

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_FORWARD = (
    torch.ops.aten._scaled_dot_product_cudnn_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
    torch.ops.hlat.attend_within_documents,
    torch.ops.hlat.attend,
)
_BACKWARD = (
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_backward,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    torch.ops.hlat.attend_within_documents_backward,
    torch.ops.hlat.attend_backward,
)


_WITH_WINDOW = (
    torch.ops.hlat.attend_within_documents,
    torch.ops.hlat.attend_within_documents_backward,
    torch.ops.hlat.attend,
    torch.ops.hlat.attend_backward,
)

_IN_PLACE = {
    torch.ops.aten.addmm_: torch.ops.aten.addmm,
    torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm,
}


def _attended_shapes(packet: Any, tensors: tuple[Any, ...], args: tuple[Any, ...]) -> list[tuple[int, ...]]:
    """Shapes of (the gradient,) queries, keys and values, with as many keys as a query attends to with a window.

    Keys and values get the heads of the queries that share them: torch's formula counts so, but demands it up to 2.11.
    """
    *queries, keys, values = (tuple(tensor.shape) for tensor in tensors)
    window = args[-1] if packet in _WITH_WINDOW else 0
    attended = min(keys[2], window or keys[2])
    return [*queries, *((*queries[-1][:2], attended, shape[3]) for shape in (keys, values))]


class FlopCounter:
    """Adds up FLOPs in ``total``."""

    def __init__(self) -> None:
        self.total = 0

    def observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Observe one operation (an ``Observer``)."""
        packet = _IN_PLACE.get(func._overloadpacket, func._overloadpacket)
        if packet in _FORWARD:
            self.total += sdpa_flop_count(*_attended_shapes(packet, args[:3], args))
        elif packet in _BACKWARD:
            self.total += sdpa_backward_flop_count(*_attended_shapes(packet, args[:4], args))
        elif packet in flop_registry:
            self.total += flop_registry[packet](*args, out_val=result)
