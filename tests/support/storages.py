"""Storages that a forward pass leaves alive, counted by their bytes after it; and a limit of what may be allocated."""

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """Notes every storage that an operation returns; weakly, so that it may go."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                known = self._seen.get(storage._cdata)
                if known is None or known.expired():
                    self._seen[storage._cdata] = StorageWeakRef(storage)
        return result

    def alive(self, known: Iterable[torch.Tensor] = ()) -> int:
        """Bytes of those that are alive, without those of some tensors."""
        without = {tensor.untyped_storage()._cdata for tensor in known}
        return sum(_bytes(one) for address, one in self._seen.items() if address not in without)


def _bytes(reference: StorageWeakRef) -> int:
    storage = None if reference.expired() else torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Let this process have so many more bytes of address space than it has now, within the block."""
    limits, used = resource.getrlimit(resource.RLIMIT_AS), psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
