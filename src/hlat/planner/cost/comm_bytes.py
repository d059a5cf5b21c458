"""Bytes that a rank exchanges in a step, by mesh axis: what crosses which links.

    PlanRequest, Candidate, pipeline rank -> tensor, context, pipeline, data: bytes of the whole tensors exchanged

Counted as a rehearsal counts them (rehearsal/traffic.py): what an all-gather gives, a reduce-scatter takes, an
all-reduce sums, a send sends. Left out are numbers of a few bytes per token or step: sums of the loss, norms. Held
against rehearsals in a test, and with them the time model's own traffic (traffic.py).
"""

from dataclasses import replace

from hlat.config.sections import ZERO_BUBBLE
from hlat.model import ModelPart
from hlat.parallel.stages import held_parts, state_of
from hlat.planner.problem import Candidate, PlanRequest
from hlat.precision import MODES

AXES = ("tensor", "context", "pipeline", "data")


def exchanged_bytes(request: PlanRequest, one: Candidate, pipeline_rank: int) -> dict[str, float]:
    """Bytes of a step by axis; those of ``data`` go over the context axis too where there is one."""
    cut = one.cut(request)
    rank = cut.first_rank(pipeline_rank)
    parts = held_parts(cut, rank)
    return {
        "tensor": _tensor(request, one, parts),
        "context": _context(request, one, parts),
        "pipeline": _pipeline(request, one, pipeline_rank),
        "data": _data(request, one, rank, parts),
    }


def _hidden(request: PlanRequest, one: Candidate) -> float:
    """Of one micro-batch between blocks."""
    tokens = one.micro_batch * request.sequence / one.context
    return tokens * request.model.hidden_size * MODES[request.mode].compute.itemsize


def _layers(request: PlanRequest, parts: list[ModelPart]) -> int:
    return sum(len(part.layer_range(request.model)) for part in parts)


def _tensor(request: PlanRequest, one: Candidate, parts: list[ModelPart]) -> float:
    """A block gathers what enters its halves and scatters what leaves them, forward and backward."""
    if one.tensor == 1:
        return 0.0
    again = 3 if one.recompute == "full" else 0  # the last scatter's result is not needed again
    messages = float(_layers(request, parts) * (8 + again))
    if one.schedule in ZERO_BUBBLE:  # each part of a backward pass computes again; the first stage's has one part
        messages += _layers(request, [part for part in parts if not part.embedding]) * again
    messages += sum(2 * part.head for part in parts)
    # Embeddings leave in the dtype of the weights: FSDP2 gathers these in the dtype that is computed in.
    mode = MODES[request.mode]
    sharded = one.zero > 0 and one.data * one.context > 1
    wider = 1.0 if sharded else mode.weights.itemsize / mode.compute.itemsize
    messages += sum(2 * part.embedding * wider for part in parts)
    return one.accumulation(request.global_batch) * messages * _hidden(request, one)


def _context(request: PlanRequest, one: Candidate, parts: list[ModelPart]) -> float:
    """Keys and values of all ranks are gathered forward, and again where they were not kept; gradients scattered."""
    if one.context == 1:
        return 0.0
    model = request.model
    tokens = one.micro_batch * request.sequence
    keys = tokens * max(model.n_kv_heads / one.tensor, 1.0) * model.n_head_dim * MODES[request.mode].compute.itemsize
    times = {"none": 2, "selective": 3, "full": 3}[one.recompute]
    return one.accumulation(request.global_batch) * _layers(request, parts) * times * 2 * keys


def _pipeline(request: PlanRequest, one: Candidate, pipeline_rank: int) -> float:
    """What a rank sends: results to the next stage, gradients to the one before."""
    sends = sum(len(others) for _, others in one.cut(request).layout.neighbours_of_stages(pipeline_rank))
    return one.accumulation(request.global_batch) * sends * _hidden(request, one) / one.tensor


def _data(request: PlanRequest, one: Candidate, rank: int, parts: list[ModelPart]) -> float:
    """ZeRO 0 sums all gradients once; FSDP2 gathers weights and scatters gradients, block by block."""
    shards = one.data * one.context
    if shards == 1:
        return 0.0
    mode = MODES[request.mode]
    micro_batches = one.accumulation(request.global_batch)

    def state(zero: int) -> tuple[float, float]:
        """Weights of the rank in elements, and those gathered with all blocks."""
        found = state_of(replace(one, zero=zero).cut(request), rank, parts, 1, 1, 0)
        return float(found.parameters), float(found.parameters_within_step - found.parameters)

    if one.zero == 0:
        return state(0)[0] * mode.reduction.itemsize
    whole = state(1)[1]
    ends = state(3)[1] if one.zero == 3 else 0.0
    gathers = {1: whole, 2: whole, 3: micro_batches * (2 * (whole - ends) + ends)}[one.zero]
    reductions = micro_batches if one.zero > 1 and one.pipeline == 1 else 1
    reduced = mode.reduction if mode.compute != mode.weights else mode.gradients
    return gathers * mode.compute.itemsize + reductions * whole * reduced.itemsize
