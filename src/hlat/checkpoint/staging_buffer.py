"""Staging buffer: a copy of the state in memory shared by two processes, so that one trains while the other writes it.

    chunks of live tensors --fill--> one contiguous buffer, and the position of each chunk in it (``Slot``)
    the same buffer in the other process, slots --chunks_in--> chunks that are views of it

The buffer is an anonymous file in memory, passed on as an open descriptor. It is freed with the last process that has
it open.
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

from hlat.checkpoint.format.tensor_files import TensorChunk
from hlat.runtime.backend.device import synchronize
from hlat.runtime.backend.table import backend_of

_ALIGNMENT = 64  # bytes: views of any dtype, and copies in whole cache lines


@dataclass(frozen=True)
class Slot:
    """Position of a chunk in the buffer, and the fields of the chunk; see ``TensorChunk``."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    replicated: bool
    begin: int  # byte offset in the buffer


def assign_slots(chunks: Sequence[TensorChunk]) -> list[Slot]:
    """Assign consecutive positions to chunks, aligned to 64 bytes."""
    slots, begin = [], 0
    for chunk in chunks:
        slots.append(Slot(chunk.name, chunk.shape, chunk.offsets, chunk.sizes, chunk.dtype, chunk.replicated, begin))
        begin += _aligned(chunk.nbytes)
    return slots


def buffer_bytes(chunks: Sequence[TensorChunk]) -> int:
    """Size in bytes of a buffer for copies of the chunks; never zero, which cannot be mapped."""
    return max(_ALIGNMENT, sum(_aligned(chunk.nbytes) for chunk in chunks))


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def chunks_in(memory: mmap.mmap, slots: Sequence[Slot]) -> list[TensorChunk]:
    """Return the chunks in a buffer; their tensors are views of it."""
    return [
        TensorChunk(slot.name, slot.shape, slot.offsets, (_view(memory, slot),), replicated=slot.replicated)
        for slot in slots
    ]


def _view(memory: mmap.mmap, slot: Slot) -> torch.Tensor:
    count = math.prod(slot.sizes)
    if not count:
        # torch.frombuffer refuses a count of zero.
        return torch.empty(slot.sizes, dtype=slot.dtype)
    return torch.frombuffer(memory, dtype=slot.dtype, count=count, offset=slot.begin).view(slot.sizes)


def attach_buffer(descriptor: int) -> mmap.mmap:
    """Map the buffer behind a descriptor into memory, and close the descriptor."""
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


class StagingBuffer:
    """The staging buffer, in the process that fills it; it is pinned if that speeds up copies from the device.

    A thread allocates its pages from the start: the first write to a page takes many times as long as later ones, and
    would otherwise slow down the first save. ``size`` is in bytes; OSError if there is too little memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self._device = size, device
        self.descriptor = _anonymous_file(size)
        self._memory = mmap.mmap(self.descriptor, size)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._error: OSError | None = None
        self._is_pinned = False
        self._allocation = threading.Thread(target=self._allocate, name="staging-buffer", daemon=True)
        self._allocation.start()

    def _allocate(self) -> None:
        try:
            if hasattr(os, "posix_fallocate"):  # macOS has none
                # fails if memory is short; writing to pages would get the process killed
                os.posix_fallocate(self.descriptor, 0, self.size)
        except OSError as error:
            self._error = error
            return
        ctypes.memset(self._bytes.data_ptr(), 0, self.size)  # releases the interpreter lock: Python and torch continue
        self._is_pinned = backend_of(self._device).pin_memory(self._bytes, self._device)

    def wait(self) -> None:
        """Wait until the buffer is allocated; OSError if there is too little memory."""
        self._allocation.join()
        if self._error is not None:
            raise self._error

    def fill(self, chunks: Sequence[TensorChunk]) -> list[Slot]:
        """Copy chunks into the buffer, from its beginning. The live tensors may change once this returns."""
        assert buffer_bytes(chunks) <= self.size, "the size of a run's state is constant"
        slots = assign_slots(chunks)
        for slot, chunk in zip(slots, chunks, strict=True):
            _copy(chunk, _view(self._memory, slot))
        # The copies are asynchronous: the next step must not change the tensors before they end.
        synchronize(self._device)
        return slots

    def chunks(self, slots: Sequence[Slot]) -> list[TensorChunk]:
        return chunks_in(self._memory, slots)

    def close(self) -> None:
        """Free the memory; while it is being allocated, which is after a failed first step, that is left to the end."""
        if self._allocation.is_alive():  # it writes to the memory and pins it, which may take minutes
            return
        if self._is_pinned:
            backend_of(self._device).unpin_memory(self._bytes, self._device)
            self._is_pinned = False
        # The memory is freed with the last view of it.
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
    # /dev/shm is small in many containers; macOS has no memfd.
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
