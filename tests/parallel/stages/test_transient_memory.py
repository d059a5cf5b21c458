"""Transient memory at the points of a step, against counts by hand."""

from dataclasses import replace

import pytest
from torch.distributed.pipelining.schedules import _Action, _add_send_recv

from hlat.config import parse_recipe
from hlat.parallel.layout import StepShape
from hlat.parallel.stages.in_flight import PENDING_SENDS, pass_order, peak_instants, posted_receives
from hlat.parallel.stages.transient_memory import transient_bytes
from hlat.planner.memory import estimate_rank_memory, rank_memory
from hlat.planner.problem.layouts import parse_layout
from tests.support.planner.requests import request_for


def test_the_messages_in_memory_do_not_grow_with_the_micro_batches():
    """Limit of those on their way; the first rank of interleaved 1F1B also receives the outputs of the last."""
    sends = ((True, False), (True, True))  # the first stage sends no gradients
    found = [
        max(instant.messages for instant in peak_instants("interleaved-1f1b", 0, 4, count, sends, (1.0, 1.0)))
        for count in (8, 16, 80)
    ]
    assert found[0] == found[1] == found[2] <= PENDING_SENDS + 3 + 2
    # 1F1B: the last message of each kind; the last rank sends no activations, the first no gradients.
    for stage, sent, most in ((0, (True, False), 2), (1, (True, True), 3), (3, (False, True), 1)):
        assert max(instant.messages for instant in peak_instants("1f1b", stage, 4, 16, (sent,), (1.0,))) == most


@pytest.mark.parametrize(("schedule", "each"), [("interleaved-1f1b", 2), ("interleaved-zero-bubble", 2), ("zbv", 2)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_receives_are_posted_as_torch_posts_them(schedule, each, ranks):
    """Against the order of sends and receives that torch's schedules derive from their passes."""
    count, last = 3 * ranks, ranks * each - 1
    kinds = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}
    orders = [pass_order(schedule, rank, ranks, count, each) for rank in range(ranks)]
    ranks_of = {stage: rank for rank, order in enumerate(orders) for _, stage, _ in order}
    actions = {
        rank: [_Action.from_str(f"{stage}{kinds[kind]}{number}") for kind, stage, number in order]
        for rank, order in enumerate(orders)
    }
    for rank, lowered in _add_send_recv(actions, ranks_of.__getitem__, last + 1).items():
        waiting, found = 0, []
        for action in lowered:
            kind, stage = action.computation_type.value, action.stage_index
            before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
            if kind.startswith("RECV"):
                waiting += 1
            elif not kind.startswith("SEND"):
                moves = kind != "W"
                waiting -= moves and 0 <= before <= last
                found.append(waiting)
                waiting += moves and 0 <= after <= last and ranks_of[after] == rank  # handed over at the turn of a V
        assert tuple(found) == posted_receives(schedule, ranks, count, each)[rank]


def test_bytes_at_the_loss():
    """While the second chunk's gradient by logits is computed, beside the first chunk's gradient by the head in fp32.

    Alive in 16 bits: the head, the hidden states and their gradient, and the chunk's logits (2048 tokens,
    model/loss.py) and their gradient; in fp32 the exponentials of the logits.
    """
    request = request_for("llama-2-7b", "a100-80gb:1", sequence=4096, global_batch=8)
    rows, head, hidden = 2048, 32000 * 4096, 4096 * 4096
    found = transient_bytes(parse_layout("zero=0,mbs=1,tp=1", request).step_shape(request), 0, (32,), (True, True), 1.0)
    at_loss = head * 4 + (head + 2 * hidden) * 2 + rows * 32000 * (2 + 2 + 4)
    assert max(moment.get("logits", 0) for moment in found) == at_loss


@pytest.mark.parametrize(("policy", "recomputed"), [("none", 0), ("full", 1)])
def test_bytes_of_a_sharded_block_that_runs_backward(policy, recomputed):
    """While SwiGLU runs: its input's gradient (2 inner), that of its output, a temporary one, and the stream's."""
    request = request_for("llama-2-7b", "a100-80gb:1", sequence=4096, global_batch=8)
    candidate = parse_layout(f"zero=3,mbs=1,ckpt={policy}", request)
    found = transient_bytes(candidate.step_shape(request), 0, (32,), (True, True), 1.0)
    blocks = [moment for moment in found if "recomputing" in moment and moment["working"]]
    inner, stream = 4096 * 2 * 11008, 4096 * 2 * 4096
    down = 2 * 4096 * 11008  # the gradient of a weight stays until the block is reduced
    freed = 0 if recomputed else inner  # the saved input of the last product is gone
    assert {moment["working"] for moment in blocks} == {4 * inner + stream + down - freed}
    # All that a block saves but x and the feed-forward activation (freed by then): norms 2, q, k, v, output, residual,
    # gate and up; and numbers per token in fp32: a log-sum-exp for each of 32 heads, two scales.
    again = 7 * stream + 2 * inner + 4096 * 4 * (32 + 2)
    assert {moment["recomputing"] for moment in blocks} == {recomputed * again}
    block = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert min(moment["buffers"] for moment in blocks) == 2 * 2 * block, "two blocks gathered in 16 bits"


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


@pytest.mark.parametrize("layout", ["tp=8,zero=0,mbs=1", "tp=4,pp=2,zero=0,mbs=1"])
def test_a_budget_limits_the_activations_of_blocks(layout):
    """The bytes that blocks keep are the budget's, with a pipeline and without; gradients of the loss come on top."""
    request = request_for("llama-2-7b", "a100-80gb:1", sequence=4096, global_batch=8)
    step = parse_layout(layout, request).step_shape(request)
    assert step.layout.pipeline == (2 if "pp=2" in layout else 1)
    limited = replace(step, policy="budget", budget=2.0**30)
    most = [
        max(
            moment["activations"]
            for moment in transient_bytes(each, 0, (32 / step.layout.pipeline,), (True, False), 1.0)
            if "activations" in moment
        )
        for each in (step, limited)
    ]
    assert most[0] > 1.5 * 2**30 and most[1] == pytest.approx(2**30)


def test_what_a_pass_keeps_follows_the_budget_of_the_recipe_in_gib():
    model = {"vocab_size": 4096, "layers": 8, "hidden_size": 1024, "intermediate_size": 4096, "heads": 8}

    def activations(budget_gib: float) -> float:
        content = {
            "model": model,
            "data": {"path": "none", "sequence_length": 4096, "tokenizer": {"train": "char"}},
            "batch": {"global_batch": 1, "micro_batch": 1},
            "memory": {"activation_checkpointing": "budget", "budget_gib": budget_gib},
            "precision": {"mode": "mixed"},
            "training": {"steps": 9},
        }
        found = transient_bytes(StepShape.of(parse_recipe(content), 1), 0, (8,), (True, True), 1.0)
        return max(moment.get("activations", 0) for moment in found)

    assert activations(0.75) - activations(0.5) == 2**28
    assert activations(40) == activations(30), "more than all of them"
