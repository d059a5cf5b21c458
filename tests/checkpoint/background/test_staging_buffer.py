"""The staging buffer: an exact copy of the state, in memory that another process can map."""

import os
import resource
from multiprocessing.connection import Connection

import pytest
import torch

from hlat.checkpoint import collect
from hlat.checkpoint.format.tensor_files import TensorChunk, replicated_chunks
from hlat.checkpoint.staging_buffer import StagingBuffer, assign_slots, attach_buffer, buffer_bytes, chunks_in
from tests.support.checkpoint.saved_states import assemble, assert_equal, state
from tests.support.checkpoint.stamped_parts import Layout, config_of, processes, stamp
from tests.support.commands import forking

CPU = torch.device("cpu")


def allocate(chunks: list[TensorChunk]) -> StagingBuffer:
    buffer = StagingBuffer(buffer_bytes(chunks), CPU)
    buffer.wait()
    return buffer


def test_it_works_with_the_system_calls_of_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """MacOS has no memfd_create and no posix_fallocate."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "posix_fallocate")
    chunks = replicated_chunks(state(1))
    buffer = allocate(chunks)
    assert_equal(assemble(buffer.chunks(buffer.fill(chunks))), state(1))
    buffer.close()


def test_the_copy_does_not_change_with_the_live_tensors() -> None:
    """With scalars, empty tensors, views and bf16."""
    live = state(1)
    chunks = replicated_chunks(live)
    buffer = allocate(chunks)
    slots = buffer.fill(chunks)
    for tensor in live.values():
        tensor.zero_()
    assert_equal(assemble(buffer.chunks(slots)), state(1))
    buffer.close()


def test_interleaved_rows_become_contiguous() -> None:
    """Fused parameters interleave the rows of several tensors; in the buffer each tensor is contiguous."""
    for process in processes(config_of("mha"), Layout(shards=2)):
        stamp(process, 3)
        chunks = collect(config_of("mha"), process.held, process.optimizer)
        assert any(len(chunk.rows) > 1 for chunk in chunks), "some chunks have several tensors of rows"
        buffer = allocate(chunks)
        for chunk, in_copy in zip(chunks, buffer.chunks(buffer.fill(chunks)), strict=True):
            assert (in_copy.name, in_copy.shape, in_copy.offsets) == (chunk.name, chunk.shape, chunk.offsets)
            assert (in_copy.sizes, in_copy.replicated) == (chunk.sizes, chunk.replicated)
            assert_equal({chunk.name: in_copy.tensor()}, {chunk.name: chunk.tensor()})
        buffer.close()


def test_a_chunk_in_the_buffer_is_written_without_another_copy() -> None:
    """``TensorChunk.tensor`` copies views of larger storages, but not views of the buffer."""
    chunks = replicated_chunks(state(2))
    buffer = allocate(chunks)
    for chunk in buffer.chunks(buffer.fill(chunks)):
        assert chunk.tensor().data_ptr() == chunk.rows[0].data_ptr()
    buffer.close()


def test_a_buffer_can_be_refilled_and_is_visible_through_its_descriptor() -> None:
    chunks = replicated_chunks(state(1))
    buffer = allocate(chunks)
    theirs = attach_buffer(os.dup(buffer.descriptor))
    for step in (1, 2, 3):
        slots = buffer.fill(replicated_chunks(state(step)))
        assert_equal(assemble(chunks_in(theirs, slots)), state(step))
    buffer.close()
    assert_equal(assemble(chunks_in(theirs, assign_slots(chunks))), state(3))


def test_a_larger_state_than_the_buffer_is_an_assertion_error() -> None:
    buffer = allocate(replicated_chunks(state(1)))
    with pytest.raises(AssertionError, match="state is constant"):
        buffer.fill([*replicated_chunks(state(1)), *replicated_chunks({"model.more": torch.ones(99)})])
    buffer.close()


def allocate_too_much(pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        StagingBuffer(1 << 21, CPU).wait()
    except OSError as error:
        pipe.send(error.strerror)


def test_lack_of_memory_raises_an_error_instead_of_killing_the_process() -> None:
    here, there = forking().Pipe(duplex=False)
    process = forking().Process(target=allocate_too_much, args=(there,))
    process.start()
    there.close()
    assert here.recv() == "File too large"
    process.join()
    assert process.exitcode == 0
