"""Peak memory of a rank, by category.

    operations -> live storages with bytes and category -> their sum -> its largest value

A storage is one allocation, shared by all its views. Its category is found in one of two ways. Parameters, gradients
and optimizer state are identified at the moment of the peak. Every other storage gets the category of the phase in
which it was created. Real tensors and the fake tensors of a rehearsal are counted alike. Not counted: memory that a
kernel allocates internally, and memory that an allocator reserves beyond the requested bytes.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hlat.runtime.process.phase import current_phase

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

    Args:
        state_categories: categories of parameters, gradients and optimizer state; called after every new peak.

    Attributes:
        total: bytes alive.
        peak: largest total so far.
        phase: phase of the step at the peak.
    """

    def __init__(self, state_categories: StateCategories) -> None:
        self._state_categories = state_categories
        self._bytes: dict[int, int] = {}
        self._category: dict[int, str] = {}
        self._finalizers: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._category_override: str | None = None
        self._peak_is_open = False
        self.total = self.peak = 0
        self.phase = ""
        self._closed_peak: tuple[dict[int, int], dict[int, str]] | None = None
        self._at_peak: Counter[str] = Counter()

    def observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Observe one operation (an ``Observer``): track the storages of its results."""
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
        """Set the category of a tensor's storage."""
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
        """Track storages that change size within the block. FSDP2 resizes them without dispatching an operation."""
        resize = torch.UntypedStorage.resize_

        def tracked(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._bytes:
                self._resize(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = tracked  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
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
        """Note what is alive at an open peak, before memory shrinks.

        Memory often shrinks in the finalizer of a storage, while a gradient that has it is being replaced. To read
        gradients then is a use after free, so the categories of state are asked for later.
        """
        if self._peak_is_open:
            self._peak_is_open = False
            self._closed_peak = dict(self._bytes), dict(self._category)

    def _count_closed_peak(self) -> None:
        """Count a closed peak by category. What was freed since then has the category of its phase."""
        if self._closed_peak is not None:
            self._at_peak = self._by_category(*self._closed_peak)
            self._closed_peak = None

    def _by_category(self, sizes: Mapping[int, int], categories: Mapping[int, str]) -> Counter[str]:
        known = self._state_categories()
        found: Counter[str] = Counter()
        for key, size in sizes.items():
            found[known.get(key) or categories[key]] += size
        return found
