"""What is alive at the instants of a step, counted by hand."""

import pytest

from hlat.parallel.stages.in_flight import instants
from hlat.parallel.stages.transient_memory import moments
from hlat.planner.memory import estimate_rank_memory, rank_memory
from hlat.planner.problem import parse_layout
from tests.support.planner.questions import question


def test_messages_of_several_stages_are_kept_until_the_step_ends_and_those_of_one_while_a_pass_is_in_flight():
    talks = ((True, False), (True, True))  # the first stage sends nothing back
    for count in (8, 16, 80):
        assert max(one.sent for one in instants("interleaved-1f1b", 0, 2, count, talks, (1.0, 1.0))) == 3 * count
    assert {one.sent for one in instants("1f1b", 3, 4, 16, ((False, True),), (1.0,))} == {0}
    assert max(one.sent for one in instants("1f1b", 0, 4, 16, ((True, False),), (1.0,))) == 4


def test_logits_of_a_chunk():
    """64 MiB of them in fp32 (model/loss.py), twice in 16 bits besides, and fp32 sums of the head's gradient."""
    asked = question("llama-2-7b", "a100-80gb:1", sequence=4096, global_batch=8)
    rows = 2**26 // (4 * 32000)
    found = moments(parse_layout("zero=0,mbs=1,tp=1", asked).step_shape(asked), 0, (32,), (True, True), 1.0)
    assert max(one.get("logits", 0) for one in found) == rows * 32000 * (2 + 2 + 4) + 32000 * 4096 * 4


@pytest.mark.parametrize(("policy", "times"), [("none", 4), ("full", 3)])
def test_a_block_that_runs_backward(policy, times):
    asked = question("llama-2-7b", "a100-80gb:1", sequence=4096, global_batch=8)
    one = parse_layout(f"zero=3,mbs=1,ckpt={policy}", asked)
    found = [
        moment for moment in moments(one.step_shape(asked), 0, (32,), (True, True), 1.0) if "recomputing" in moment
    ]
    assert {moment["working"] for moment in found} == {times * 4096 * 2 * 11008}
    block = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert min(moment["buffers"] for moment in found) == 2 * 2 * block, "two blocks gathered in 16 bits"


def test_in_a_v_the_first_rank_has_embedding_and_head():
    """12 bytes of weights and moments for each of 2 x 128256 x 4096 / 2."""
    asked = question("llama-3-8b", "h100:1", global_batch=64)
    one = parse_layout("tp=2,pp=4,zero=0,schedule=zbv,recompute=full", asked)
    first, last = (estimate_rank_memory(asked, one, rank) for rank in (0, 3))
    state = first.parameters + first.optimizer - last.parameters - last.optimizer
    assert state == pytest.approx(12 * 2 * 128256 * 4096 / 2)


def test_the_allocator_loses_a_share_of_what_comes_and_goes():
    asked = question("llama-2-70b", "h100:8", global_batch=64)
    memory = rank_memory(asked, parse_layout("tp=8,pp=4,recompute=full", asked), 0)
    moving = memory.activations + memory.recomputing + memory.logits + memory.working + memory.buffers
    assert memory.slack == pytest.approx(0.06 * moving)
