"""How many floating-point operations a rank does: matrix products and attention, as torch counts them.

    operation, shapes -> FLOPs by torch's formulas; a multiply-add is two, attention counts all pairs of positions

What is computed again in backward counts again, and so do the products of a loss that is computed in chunks: these are
the FLOPs of the program, not those of the model (``hlat.model.derived.flops_per_token``).
"""

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_FORWARD = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, torch.ops.hlat.attend_within)
_BACKWARD = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    torch.ops.hlat.attend_within_backward,
)


class FlopCounter:
    """Adds them up in ``total``."""

    def __init__(self) -> None:
        self.total = 0

    def observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """An ``Observer``."""
        packet = func._overloadpacket
        if packet in _FORWARD:
            self.total += sdpa_flop_count(*(one.shape for one in args[:3]))
        elif packet in _BACKWARD:
            self.total += sdpa_backward_flop_count(*(one.shape for one in args[:4]))
        elif packet in flop_registry:
            self.total += flop_registry[packet](*args, out_val=result)
