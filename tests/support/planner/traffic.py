"""Memory traffic of plain torch programs."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Sums the bytes of tensors of some number of elements that operations read and write.

    Left out are views, and look-ups of one element per row.
    """

    def __init__(self, elements):
        super().__init__()
        self.elements, self.bytes = elements, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, (tuple, list)) else [args[0] if out is None else out]  # overwritten if None
        if not func.is_view and func.overloadpacket not in (torch.ops.aten.gather, torch.ops.aten.scatter_add_):
            tensors = [one for one in (*args, *results) if isinstance(one, torch.Tensor)]
            self.bytes += sum(one.numel() * one.element_size() for one in tensors if one.numel() == self.elements)
        return out
