"""A rank of any world on this machine: tensors without memory, and collectives that are done at once.

    rank, world --> torch's FakeTensorMode, torch's process group "fake" --> Runtime

The program that runs inside is the real one: every tensor has its shape, dtype, strides and storage, and no bytes.
What it may not do is look at a value on the device. Values on the host, such as the tokens of a batch, are looked at
within ``host_values``.
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
    """Be one rank of a world, until the end of the block, without memory and without the other ranks.

    Args:
        rank, world: 0 <= rank < world. Tensors say that they are on a CPU.

    Raises:
        LaunchError: this process is one of a run already.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415  (a run has no use for them)
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  (registers the backend)

    if dist.is_initialized():
        raise LaunchError("this process has joined a run: a rehearsal needs one of its own.")
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _messages_kept():
            yield Runtime(torch.device("cpu"), rank, world)
    finally:
        if world > 1:
            dist.destroy_process_group()
            _forget_meshes()


@contextmanager
def _messages_kept() -> Iterator[None]:
    """What is sent stays as long as the handle of the sending, as with real process groups."""
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
    """DTensor remembers the meshes of what it has dispatched; in the next world it would hand out the last one's."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: PLC0415

    _clear_sharding_prop_cache()


def in_fake_world() -> bool:
    """Whether tensors that are made now have no memory."""
    return torch._C._get_dispatch_mode(_FAKE) is not None


@contextmanager
def host_values() -> Iterator[None]:
    """Within the block tensors have memory, also in a rehearsal: for what looks at values that are on the host."""
    mode = torch._C._unset_dispatch_mode(_FAKE)
    try:
        yield
    finally:
        if mode is not None:
            torch._C._set_dispatch_mode(mode)
