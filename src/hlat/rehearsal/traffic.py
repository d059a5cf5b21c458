"""What a rank sends and receives: every message that it hands to torch.distributed, by the axes that it goes over.

    operation of torch.distributed -> kind, bytes, group -> axes on which the group's ranks differ -> Message, counted

The size of a message is that of the whole tensor it is about: what an all-gather gives, a reduce-scatter takes, an
all-reduce sums, a send sends.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from hlat.parallel.mesh import Layout

_KINDS = {  # by the name of the operation; one that is not here is counted under its own name
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "send": "send",
    "recv_": "receive",
}
_AXES = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor"}


class Message(NamedTuple):
    """A message, of which a rank may send many.

    Attributes:
        axis: the mesh axis that it goes over, or several, as in "data+context".
        kind: all_gather, reduce_scatter, all_reduce, send or receive.
        bytes: of the whole tensor.
    """

    axis: str
    kind: str
    bytes: int


class MessageCounter:
    """Counts messages.

    Args:
        layout: says which ranks stand where.
        buffer: told of every tensor that is sent or received, with the axis.
    """

    def __init__(self, layout: Layout, buffer: Callable[[torch.Tensor, str], None]) -> None:
        self._layout, self._buffer = layout, buffer
        self._axes: dict[str, str] = {}
        self.messages: Counter[Message] = Counter()

    def observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """An ``Observer``."""
        if func.namespace != "c10d":
            return
        name = func._schema.name.partition("::")[2]
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        axis = self._axis(args)
        self.messages[Message(axis, _KINDS.get(name, name), max((one.nbytes for one in tensors), default=0))] += 1
        for tensor in tensors:
            self._buffer(tensor, axis)

    def _axis(self, args: Iterable[Any]) -> str:
        (group,) = (ProcessGroup.unbox(one) for one in args if _is_group(one))
        if group.group_name not in self._axes:
            places = [self._layout.coordinates(rank) for rank in dist.get_process_group_ranks(group)]
            names = [name for axis, name in _AXES.items() if len({getattr(place, axis) for place in places}) > 1]
            self._axes[group.group_name] = "+".join(names)
        return self._axes[group.group_name]


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())
