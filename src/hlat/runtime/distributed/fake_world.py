"""Simulate one rank of a world of any size: tensors without memory, and collectives that complete at once.

    rank, world --> torch's FakeTensorMode, torch's process group "fake" --> Runtime

The program inside is the real one: every tensor has its shape, dtype, strides and storage, but no data. The program
must not read values on the device. Values on the host, such as the tokens of a batch, are created and read within
``host_values``.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import LaunchError

_FAKE = torch._C._TorchDispatchModeKey.FAKE


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[Runtime]:
    """Simulate one rank of a world within the block, without memory and without the other ranks.

    Args:
        rank: the rank to simulate, 0 <= rank < world.
        world: world size.

    Yields:
        The runtime of the rank. Its tensors report a CPU as device.

    Raises:
        LaunchError: this process has already joined a run.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415  (real runs do not need it)
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  (registers the backend)

    if dist.is_initialized():
        raise LaunchError("this process has already joined a run: a rehearsal needs a process of its own.")
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _keep_sent_tensors():
            yield Runtime(torch.device("cpu"), rank, world)
    finally:
        if world > 1:
            dist.destroy_process_group()
            _forget_meshes()


@contextmanager
def _keep_sent_tensors() -> Iterator[None]:
    """Keep sent tensors alive as long as the handle of the send, as real process groups do."""
    send = ProcessGroup.send

    def keeping(group: ProcessGroup, tensors: list[torch.Tensor], *args: Any) -> dist.Work:
        work = send(group, tensors, *args)
        weakref.finalize(work, list.clear, list(tensors)).atexit = False
        return work

    ProcessGroup.send = keeping  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ProcessGroup.send = send  # type: ignore[method-assign]


def _forget_meshes() -> None:
    """Clear DTensor's cache: it remembers device meshes, and would return those of this world in the next."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: PLC0415

    _clear_sharding_prop_cache()


def in_fake_world() -> bool:
    """Return True if new tensors are created without memory."""
    return torch._C._get_dispatch_mode(_FAKE) is not None


@contextmanager
def host_values() -> Iterator[None]:
    """Create tensors with memory within the block, also in a fake world, for code that reads values on the host."""
    mode = torch._C._unset_dispatch_mode(_FAKE)
    try:
        yield
    finally:
        if mode is not None:
            torch._C._set_dispatch_mode(mode)
