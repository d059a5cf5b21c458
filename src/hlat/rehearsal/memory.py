"""How much memory a rank needs, and for what, at the moment at which it needs most.

    operations -> storages, each with its bytes and what it is for, while they live -> their sum -> the largest of it

A storage is one allocation, whatever tensors look at it. What it is for is known in two ways: parameters, gradients and
moments by what they are, at the moment of the peak; all else by what the program was doing when the storage was made.
Real tensors and those of a rehearsal are counted alike. Not seen is what a kernel allocates for itself, and what an
allocator keeps beyond what it was asked for.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hlat.runtime.process import current_phase

CATEGORIES = {
    "parameters": "what the rank holds between steps; in the modes with fp32 weights these are the master weights",
    "gathered": "whole parameters, gathered from their shards for a while",
    "gradients": "of the parameters, whole or shards",
    "optimizer": "moments and counters of AdamW",
    "activations": "made by the forward pass: kept for backward, or in use at that moment",
    "loss": "made by head and loss: logits of a chunk, and the gradients that are kept of them",
    "communication": "what is sent over the data and pipeline axes, and what is received",
    "temporaries": "made by backward, reduction and optimizer step",
    "other": "made outside of a step: the batch, tables",
}
"""What memory is for, each with a sentence."""

_BY_PHASE = {"forward": "activations", "backward": "temporaries", "reduce": "temporaries", "optimizer": "temporaries"}

Known = Callable[[], Mapping[int, str]]
"""Tells, by ``storage_key``, what storages are for that are known by what they are."""


def storage_key(tensor: torch.Tensor) -> int:
    """The same for tensors that share memory, while it lives."""
    return int(tensor.untyped_storage()._cdata)


class MemoryTracker:
    """The storages that are alive.

    Args:
        known: what some of them are for; asked when there has never been as much.

    Attributes:
        total: bytes alive.
        peak: the most that there were.
    """

    def __init__(self, known: Known) -> None:
        self._known = known
        self._bytes: dict[int, int] = {}
        self._category: dict[int, str] = {}
        self._watching: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._within: str | None = None
        self._rising = False
        self.total = self.peak = 0
        self.phase = ""
        self._at_peak: Counter[str] = Counter()

    def observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """An ``Observer``."""
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)

    def at_peak(self) -> dict[str, int]:
        """Bytes of each category when there was most; they add up to ``peak``."""
        self._look()
        return {name: self._at_peak[name] for name in CATEGORIES}

    def now(self) -> dict[str, int]:
        """Bytes of each category at this moment; they add up to ``total``."""
        found = self._by_category()
        return {name: found[name] for name in CATEGORIES}

    def assign(self, tensor: torch.Tensor, category: str) -> None:
        """Say what the storage of a tensor is for, from now on."""
        self._note(tensor)
        self._category[storage_key(tensor)] = category

    @contextmanager
    def within(self, category: str) -> Iterator[None]:
        """What is made in the block is for this, whatever the phase."""
        before, self._within = self._within, category
        try:
            yield
        finally:
            self._within = before

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Notice storages that change their size, as FSDP2's do: no operation does that."""
        resize = torch.UntypedStorage.resize_

        def noticed(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._bytes:
                self._change(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = noticed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._bytes or tensor.device.type == "meta":
            return
        self._bytes[key] = 0
        self._category[key] = self._within or _BY_PHASE.get(current_phase(), "other")
        self._watching[key] = weakref.ref(storage, lambda _: self._gone(key))
        self._change(key, storage.nbytes())

    def _change(self, key: int, size: int) -> None:
        change = size - self._bytes[key]
        if change < 0:
            self._look()
        self._bytes[key] = size
        self.total += change
        if self.total > self.peak:
            self.peak, self.phase, self._rising = self.total, current_phase(), True

    def _gone(self, key: int) -> None:
        self._change(key, 0)
        del self._bytes[key], self._category[key], self._watching[key]

    def _look(self) -> None:
        """What there is, if it has never been as much: before it becomes less."""
        if self._rising:
            self._rising = False
            self._at_peak = self._by_category()

    def _by_category(self) -> Counter[str]:
        known = self._known()
        found: Counter[str] = Counter()
        for key, size in self._bytes.items():
            found[known.get(key) or self._category[key]] += size
        return found
