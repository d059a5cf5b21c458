"""Transient memory at the points of a step, against counts by hand."""

import pytest

from hlat.parallel.stages.in_flight import peak_instants
from hlat.parallel.stages.transient_memory import transient_bytes
from hlat.planner.memory import estimate_rank_memory, rank_memory
from hlat.planner.problem import parse_layout
from tests.support.planner.requests import request_for


def test_several_stages_per_rank_keep_sent_messages_until_the_step_ends_and_one_stage_while_passes_are_in_flight():
    sends = ((True, False), (True, True))  # the first stage sends no gradients
    for count in (8, 16, 80):
        found = peak_instants("interleaved-1f1b", 0, 2, count, sends, (1.0, 1.0))
        assert max(instant.sent for instant in found) == 3 * count
    assert {instant.sent for instant in peak_instants("1f1b", 3, 4, 16, ((False, True),), (1.0,))} == {0}
    assert max(instant.sent for instant in peak_instants("1f1b", 0, 4, 16, ((True, False),), (1.0,))) == 4


def test_bytes_of_the_logits_of_a_chunk():
    """64 MiB in fp32 (model/loss.py), two copies in 16 bits, and fp32 sums of the head's gradient."""
    request = request_for("llama-2-7b", "a100-80gb:1", sequence=4096, global_batch=8)
    rows = 2**26 // (4 * 32000)
    found = transient_bytes(parse_layout("zero=0,mbs=1,tp=1", request).step_shape(request), 0, (32,), (True, True), 1.0)
    assert max(moment.get("logits", 0) for moment in found) == rows * 32000 * (2 + 2 + 4) + 32000 * 4096 * 4


@pytest.mark.parametrize(("policy", "times"), [("none", 4), ("full", 3)])
def test_bytes_of_a_block_that_runs_backward(policy, times):
    request = request_for("llama-2-7b", "a100-80gb:1", sequence=4096, global_batch=8)
    candidate = parse_layout(f"zero=3,mbs=1,ckpt={policy}", request)
    found = [
        moment
        for moment in transient_bytes(candidate.step_shape(request), 0, (32,), (True, True), 1.0)
        if "recomputing" in moment
    ]
    assert {moment["working"] for moment in found} == {times * 4096 * 2 * 11008}
    block = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert min(moment["buffers"] for moment in found) == 2 * 2 * block, "two blocks gathered in 16 bits"


def test_in_a_zbv_schedule_the_first_rank_has_embedding_and_head():
    """12 bytes of weights and moments for each of 2 x 128256 x 4096 / 2 elements."""
    request = request_for("llama-3-8b", "h100:1", global_batch=64)
    candidate = parse_layout("tp=2,pp=4,zero=0,schedule=zbv,recompute=full", request)
    first, last = (estimate_rank_memory(request, candidate, rank) for rank in (0, 3))
    state = first.parameters + first.optimizer - last.parameters - last.optimizer
    assert state == pytest.approx(12 * 2 * 128256 * 4096 / 2)


def test_allocator_slack_is_a_share_of_transient_memory():
    request = request_for("llama-2-70b", "h100:8", global_batch=64)
    memory = rank_memory(request, parse_layout("tp=8,pp=4,recompute=full", request), 0)
    transient = memory.activations + memory.recomputing + memory.logits + memory.working + memory.buffers
    assert memory.slack == pytest.approx(0.06 * transient)
