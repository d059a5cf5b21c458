"""The copy of the state that training goes on beside: the same bits, in memory that another process can see."""

import multiprocessing
import os
import resource
from multiprocessing.connection import Connection

import pytest
import torch

from hlat.checkpoint import collect
from hlat.checkpoint.background.staging_buffer import (
    StagingBuffer,
    assign_slots,
    attach_buffer,
    buffer_bytes,
    chunks_in,
)
from hlat.checkpoint.format import TensorChunk, replicated_chunks
from tests.support.checkpoint.saved_states import assert_equal, state, together
from tests.support.checkpoint.stamped_parts import Cut, config_of, processes, stamp

CPU = torch.device("cpu")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "hlat.checkpoint", "tests.support.checkpoint.saved_states"])


def copied(blocks: list[TensorChunk]) -> StagingBuffer:
    copy = StagingBuffer(buffer_bytes(blocks), CPU)
    copy.wait()
    return copy


def test_a_copy_is_the_state_and_stays_it() -> None:
    """Scalars, empty tensors, views, bf16: what is changed afterwards is not changed in it."""
    live = state(1)
    blocks = replicated_chunks(live)
    copy = copied(blocks)
    slots = copy.fill(blocks)
    for tensor in live.values():
        tensor.zero_()
    assert_equal(together(copy.chunks(slots)), state(1))
    copy.close()


def test_fused_rows_are_put_together() -> None:
    """Parameters that fuse several tensors interleave their rows: in a copy each tensor lies in one piece."""
    for process in processes(config_of("mha"), Cut(shards=2)):
        stamp(process, 3)
        blocks = collect(config_of("mha"), process.held, process.optimizer)
        assert any(len(block.rows) > 1 for block in blocks), "there is something to be put together"
        copy = copied(blocks)
        for block, in_copy in zip(blocks, copy.chunks(copy.fill(blocks)), strict=True):
            assert (in_copy.name, in_copy.shape, in_copy.offsets) == (block.name, block.shape, block.offsets)
            assert (in_copy.sizes, in_copy.replicated) == (block.sizes, block.replicated)
            assert_equal({block.name: in_copy.tensor()}, {block.name: block.tensor()})
        copy.close()


def test_a_view_of_the_copy_is_written_without_another_copy() -> None:
    """``Block.tensor`` copies what is part of a larger storage: a view of the memory is not."""
    blocks = replicated_chunks(state(2))
    copy = copied(blocks)
    for block in copy.chunks(copy.fill(blocks)):
        assert block.tensor().data_ptr() == block.rows[0].data_ptr()
    copy.close()


def test_it_is_filled_again_and_again_and_whoever_has_the_descriptor_sees_it() -> None:
    blocks = replicated_chunks(state(1))
    copy = copied(blocks)
    theirs = attach_buffer(os.dup(copy.descriptor))
    for step in (1, 2, 3):
        slots = copy.fill(replicated_chunks(state(step)))
        assert_equal(together(chunks_in(theirs, slots)), state(step))
    copy.close()
    assert_equal(together(chunks_in(theirs, assign_slots(blocks))), state(3))


def test_a_state_that_has_grown_is_a_bug() -> None:
    copy = copied(replicated_chunks(state(1)))
    with pytest.raises(AssertionError, match="size of a run.s state is constant"):
        copy.fill([*replicated_chunks(state(1)), *replicated_chunks({"model.more": torch.ones(99)})])
    copy.close()


def ask_for_too_much(pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        StagingBuffer(1 << 21, CPU).wait()
    except OSError as error:
        pipe.send(error.strerror)


def test_memory_that_is_not_there_is_an_error_and_not_the_end() -> None:
    here, there = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=ask_for_too_much, args=(there,))
    process.start()
    there.close()
    assert here.recv() == "File too large"
    process.join()
    assert process.exitcode == 0
