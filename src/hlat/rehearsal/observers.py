"""Observers of every operation on plain tensors, backward passes and collectives included; and their memory.

    operation -> executed -> observer(operation, arguments, result), in order of execution
        MemoryTracker   -> live storages with bytes and category -> their sum -> its largest value
        Trace (trace.py) -> messages, products and others in their order
    group of a message -> MeshAxes -> axes along which the group's ranks differ

A storage is one allocation, shared by all its views. Parameters, gradients and optimizer state are identified at the
moment of the peak. Every other storage gets the category of the phase in which it was created. Real tensors and the
fake tensors of a rehearsal are counted alike. Not counted: memory that a kernel allocates internally, and memory that
an allocator reserves beyond the requested bytes.

A message counts the bytes of the complete tensor: the output of an all-gather, the input of a reduce-scatter, the
operand of an all-reduce, the larger of input and output of an all-to-all, the tensor sent.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hlat.parallel import Layout
from hlat.runtime.distributed.join import in_fake_world
from hlat.runtime.progress import current_phase

Observer = Callable[[Any, tuple[Any, ...], Any], None]
"""Function of an operation, its arguments and its result."""


class OperationObserver(TorchDispatchMode):
    """Dispatch mode that reports operations of this thread, and of the backward passes it starts, to observers."""

    def __init__(self, *observers: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observers = observers
        self._in_fake_world = in_fake_world()
        self._inferring_shapes = 0  # depth of calls in which DTensor infers shapes, on tensors that use no memory
        # DTensor infers shapes by running operations, which this mode would count as those of the step.
        infer = ShardingPropagator._propagate_tensor_meta_non_cached

        def infer_unobserved(*args: Any) -> Any:
            self._inferring_shapes += 1
            try:
                return infer(*args)
            finally:
                self._inferring_shapes -= 1

        self._shape_inference = patch.object(ShardingPropagator, infer.__name__, infer_unobserved)

    def __enter__(self) -> "OperationObserver":
        self._shape_inference.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._shape_inference.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches to operations on local tensors, which are seen here
        result = func(*args, **(kwargs or {}))
        on_host = self._in_fake_world and not in_fake_world()  # within ``host_values``
        if not self._inferring_shapes and not on_host:
            for observer in self._observers:
                observer(func, args, result)
        return result


CATEGORIES = {
    "parameters": "parameters stored between steps; the master weights in modes with fp32 weights",
    "gathered": "full parameters, gathered temporarily from their shards",
    "gradients": "gradients of parameters, full or sharded",
    "optimizer": "state of the optimizer: moments and step counters",
    "components": "state of training components, such as an average of the weights",
    "activations": "tensors of the forward pass: kept for backward, or in use at that moment",
    "loss": "tensors of head and loss: logits of a chunk, and the gradients kept of them",
    "communication": "send and receive buffers of the data and pipeline axes",
    "temporaries": "tensors of backward, gradient reduction and optimizer step",
    "other": "tensors created outside a step: the batch, tables",
}
"""Categories of memory, each with a description."""

_BY_PHASE = {"forward": "activations", "backward": "temporaries", "reduce": "temporaries", "optimizer": "temporaries"}

StateCategories = Callable[[], Mapping[int, str]]
"""Returns the categories of the storages of parameters, gradients and optimizer state, by ``storage_key``."""


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the tensor's storage: equal for tensors that share memory, unique while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


class MemoryTracker:
    """Live storages, their total and its peak.

    ``state_categories`` gives the categories of parameters, gradients and optimizer state; called after every new peak.
    """

    def __init__(self, state_categories: StateCategories) -> None:
        self._state_categories = state_categories
        self._bytes: dict[int, int] = {}
        self._category: dict[int, str] = {}
        self._finalizers: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._category_override: str | None = None
        self._peak_is_open = False
        self.total = self.peak = 0  # bytes alive, and the largest total so far
        self.phase = ""  # of the step, at the peak
        self._closed_peak: tuple[dict[int, int], dict[int, str]] | None = None
        self._at_peak: Counter[str] = Counter()

    def observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Track the storages of an operation's results (an ``Observer``)."""
        # An operation has ended, so gradients can be read now; see _close_peak.
        self._count_closed_peak()
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)

    def at_peak(self) -> dict[str, int]:
        """Bytes of each category at the peak; they add up to ``peak``."""
        self._close_peak()
        self._count_closed_peak()
        return {name: self._at_peak[name] for name in CATEGORIES}

    def now(self) -> dict[str, int]:
        """Bytes of each category now; they add up to ``total``."""
        found = self._by_category(self._bytes, self._category)
        return {name: found[name] for name in CATEGORIES}

    def assign(self, tensor: torch.Tensor, category: str) -> None:
        self._add(tensor)
        self._category[storage_key(tensor)] = category

    @contextmanager
    def within(self, category: str) -> Iterator[None]:
        """Give this category to all storages created in the block, whatever the phase."""
        before, self._category_override = self._category_override, category
        try:
            yield
        finally:
            self._category_override = before

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Track storages that change size within the block."""
        # FSDP2 resizes storages without dispatching an operation.
        resize = torch.UntypedStorage.resize_

        def tracked(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._bytes:
                self._resize(storage._cdata, storage.nbytes())
            return result

        with patch.object(torch.UntypedStorage, "resize_", tracked):
            yield

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        # Meta tensors use no memory.
        if key in self._bytes or tensor.device.type == "meta":
            return
        self._bytes[key] = 0
        self._category[key] = self._category_override or _BY_PHASE.get(current_phase(), "other")
        self._finalizers[key] = weakref.ref(storage, lambda _: self._remove(key))
        self._resize(key, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        change = size - self._bytes[key]
        if change < 0:
            self._close_peak()
        self._bytes[key] = size
        self.total += change
        if self.total > self.peak:
            self.peak, self.phase, self._peak_is_open = self.total, current_phase(), True

    def _remove(self, key: int) -> None:
        self._resize(key, 0)
        del self._bytes[key], self._category[key], self._finalizers[key]

    def _close_peak(self) -> None:
        """Note what is alive at an open peak, before memory shrinks."""
        # Memory often shrinks in the finalizer of a storage, while a gradient that has it is being replaced. To read
        # gradients then is a use after free, so the categories of state are asked for later.
        if self._peak_is_open:
            self._peak_is_open = False
            self._closed_peak = dict(self._bytes), dict(self._category)

    def _count_closed_peak(self) -> None:
        """Count a closed peak by category. What was freed since then has that of its phase."""
        if self._closed_peak is not None:
            self._at_peak = self._by_category(*self._closed_peak)
            self._closed_peak = None

    def _by_category(self, sizes: Mapping[int, int], categories: Mapping[int, str]) -> Counter[str]:
        known = self._state_categories()
        found: Counter[str] = Counter()
        for key, size in sizes.items():
            found[known.get(key) or categories[key]] += size
        return found


_KINDS = {  # by operation name; other operations keep their own name
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
}
_AXES = ("pipeline", "data", "context", "tensor")  # in the order of ``Coordinates``


class Message(NamedTuple):
    """A kind of message, which a rank may send many times."""

    axis: str  # of the mesh; or several, as in "data+context"
    kind: str  # all_gather, reduce_scatter, all_reduce, all_to_all, send or receive
    bytes: int  # of the complete tensor


class MeshAxes:
    """Mesh axes of the groups of a layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._axes: dict[str, str] = {}  # by name of the group

    def of(self, args: Iterable[Any]) -> str:
        """Mesh axes along which the ranks of an operation's group differ, joined by "+"."""
        (group,) = (ProcessGroup.unbox(value) for value in args if _is_group(value))
        if group.group_name not in self._axes:
            positions = [self._layout.coordinates(rank) for rank in dist.get_process_group_ranks(group)]
            by_axis = zip(_AXES, zip(*positions, strict=True), strict=True)
            self._axes[group.group_name] = "+".join(name for name, indices in by_axis if len(set(indices)) > 1)
        return self._axes[group.group_name]


def message_kind(func: Any) -> str:
    """Kind of message of an operation of torch.distributed, as in ``Message``."""
    name: str = func._schema.name.partition("::")[2]
    return _KINDS.get(name, name)


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())
