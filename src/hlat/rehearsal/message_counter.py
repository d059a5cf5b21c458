"""Messages of a rank: everything it passes to torch.distributed, by mesh axis.

    torch.distributed operation -> kind, bytes, group -> axes along which the group's ranks differ -> Message, counted

A message counts the bytes of the complete tensor: the output of an all-gather, the input of a reduce-scatter, the
operand of an all-reduce, the larger of input and output of an all-to-all, the tensor sent.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from hlat.parallel import Layout

_KINDS = {  # by operation name; other operations keep their own name
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
}
_AXES = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor"}


class Message(NamedTuple):
    """A kind of message, which a rank may send many times.

    Attributes:
        axis: mesh axis of the group, or several, as in "data+context".
        kind: all_gather, reduce_scatter, all_reduce, all_to_all, send or receive.
        bytes: size of the complete tensor.
    """

    axis: str
    kind: str
    bytes: int


class MessageCounter:
    """Counts messages in ``messages``.

    Args:
        layout: position of every rank on the mesh axes.
        on_buffer: called with every tensor sent or received, and the axis.
    """

    def __init__(self, layout: Layout, on_buffer: Callable[[torch.Tensor, str], None]) -> None:
        self._layout, self._on_buffer = layout, on_buffer
        self._axes: dict[str, str] = {}
        self.messages: Counter[Message] = Counter()

    def observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Observe one operation (an ``Observer``)."""
        if func.namespace != "c10d":
            return
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        axis = self.axis_of(args)
        self.messages[Message(axis, message_kind(func), max((tensor.nbytes for tensor in tensors), default=0))] += 1
        for tensor in tensors:
            self._on_buffer(tensor, axis)

    def axis_of(self, args: Iterable[Any]) -> str:
        """Return the mesh axes along which the ranks of an operation's group differ."""
        (group,) = (ProcessGroup.unbox(value) for value in args if _is_group(value))
        if group.group_name not in self._axes:
            positions = [self._layout.coordinates(rank) for rank in dist.get_process_group_ranks(group)]
            names = [
                name for axis, name in _AXES.items() if len({getattr(position, axis) for position in positions}) > 1
            ]
            self._axes[group.group_name] = "+".join(names)
        return self._axes[group.group_name]


def message_kind(func: Any) -> str:
    """Return the kind of message of an operation of torch.distributed, as in ``Message``."""
    name: str = func._schema.name.partition("::")[2]
    return _KINDS.get(name, name)


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())
