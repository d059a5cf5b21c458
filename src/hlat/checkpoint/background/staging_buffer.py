"""A copy of the state in memory that two processes share: one trains on, the other writes the copy.

    blocks of live tensors --fill--> one stretch of memory, and where each block lies in it (``Slot``)
    the same memory in the other process, slots --chunks_in--> blocks, views of it

The memory has no name: it is a file that was never in a folder, handed over as an open descriptor, and it is gone with
the last process that holds it.
"""

import ctypes
import math
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hlat.checkpoint.format import TensorChunk
from hlat.runtime.backend import pin_memory, synchronize, unpin_memory

_ALIGNMENT = 64  # bytes: views of any dtype, and copies in whole cache lines


@dataclass(frozen=True)
class Slot:
    """Where a block lies in the memory, and what it is."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    replicated: bool
    begin: int  # byte


def assign_slots(chunks: Sequence[TensorChunk]) -> list[Slot]:
    """One after another, each where views of it may begin."""
    slots, begin = [], 0
    for chunk in chunks:
        slots.append(Slot(chunk.name, chunk.shape, chunk.offsets, chunk.sizes, chunk.dtype, chunk.replicated, begin))
        begin += _aligned(chunk.nbytes)
    return slots


def buffer_bytes(chunks: Sequence[TensorChunk]) -> int:
    """Bytes of memory that a copy of some blocks takes."""
    return max(_ALIGNMENT, sum(_aligned(chunk.nbytes) for chunk in chunks))


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def chunks_in(memory: mmap.mmap, slots: Sequence[Slot]) -> list[TensorChunk]:
    """What lies in the memory, as blocks that are views of it."""
    return [
        TensorChunk(slot.name, slot.shape, slot.offsets, (_view(memory, slot),), replicated=slot.replicated)
        for slot in slots
    ]


def _view(memory: mmap.mmap, slot: Slot) -> torch.Tensor:
    count = math.prod(slot.sizes)
    if not count:
        return torch.empty(slot.sizes, dtype=slot.dtype)
    return torch.frombuffer(memory, dtype=slot.dtype, count=count, offset=slot.begin).view(slot.sizes)


def attach_buffer(descriptor: int) -> mmap.mmap:
    """The memory behind a descriptor, which is closed."""
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


class StagingBuffer:
    """The memory, in the process that fills it.

    Its pages are fetched by a thread from the moment it is made: the first touch of a page costs many times what later
    copies into it do, and would otherwise be part of the first save.

    Args:
        size: bytes.
        device: that copies come from; the memory is pinned where that helps.

    Raises:
        OSError: there is not so much memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self._device = size, device
        self.descriptor = _anonymous_file(size)
        self._memory = mmap.mmap(self.descriptor, size)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._error: OSError | None = None
        self._is_pinned = False
        self._fetching = threading.Thread(target=self._fetch, name="host-copy", daemon=True)
        self._fetching.start()

    def _fetch(self) -> None:
        try:
            os.posix_fallocate(self.descriptor, 0, self.size)  # where memory is short this fails; a touch would kill
        except OSError as error:
            self._error = error
            return
        ctypes.memset(self._bytes.data_ptr(), 0, self.size)  # on one thread, while Python and torch go on
        self._is_pinned = pin_memory(self._bytes, self._device)

    def wait(self) -> None:
        """Wait until the memory is there.

        Raises:
            OSError: there is not so much.
        """
        self._fetching.join()
        if self._error is not None:
            raise self._error

    def fill(self, chunks: Sequence[TensorChunk]) -> list[Slot]:
        """Copy blocks into the memory, from its beginning. They may change once this returns."""
        assert buffer_bytes(chunks) <= self.size, "the state of a run keeps its size"
        slots = assign_slots(chunks)
        for slot, chunk in zip(slots, chunks, strict=True):
            _copy(chunk, _view(self._memory, slot))
        synchronize(self._device)
        return slots

    def chunks(self, slots: Sequence[Slot]) -> list[TensorChunk]:
        """What was copied."""
        return chunks_in(self._memory, slots)

    def close(self) -> None:
        """Let go of the memory, which goes with the last view of it."""
        self._fetching.join()
        if self._is_pinned:
            unpin_memory(self._bytes, self._device)
            self._is_pinned = False
        os.close(self.descriptor)


def _copy(chunk: TensorChunk, target: torch.Tensor) -> None:
    if target.ndim == 0:
        target.copy_(chunk.rows[0].detach(), non_blocking=True)
        return
    first = 0
    for rows in chunk.rows:
        target[first : first + rows.shape[0]].copy_(rows.detach(), non_blocking=True)
        first += rows.shape[0]


def _anonymous_file(size: int) -> int:
    """A file without a name: in memory, where the system has such files; /dev/shm is small in many containers."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hlat")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
