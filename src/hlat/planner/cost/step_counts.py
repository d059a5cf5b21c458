"""Counts of a rank in a step: FLOPs that it executes and bytes that it exchanges.

    PlanRequest, Candidate, pipeline rank --executed_flops--> FLOPs of matrix products and attention
                                          --exchanged_bytes-> bytes over the axes tensor, context, pipeline, data

FLOPs are the rank's share of the model's, recomputation, and whole matrices of the optimizer. They are counted as in a
rehearsal (rehearsal/trace.py): a multiply-add is two FLOPs; attention counts all pairs of positions that its kernel
computes; its backward pass recomputes the scores. A test compares the counts with rehearsals; they are equal.

A message counts the bytes of the complete tensor, as in a rehearsal (rehearsal/observers.py). Messages of a few bytes
per token or step are left out (loss sums, norms). Tests compare these counts with rehearsals, and the time model's own
communication volume (comm_time.py) with these counts.
"""

from typing import Literal

from hlat.config import ZERO_BUBBLE
from hlat.model import ModelShard, vocabulary_rows
from hlat.parallel import MatrixPlan, gathered_ends, rank_model_shards, state_bytes_of_shards
from hlat.planner.problem.layouts import Candidate
from hlat.planner.problem.request import PlanRequest
from hlat.precision import MODES

_CORE_PRODUCTS = {"forward": 2, "backward": 5}  # flash attention's products of (queries x positions x head width)


def executed_flops(request: PlanRequest, candidate: Candidate, pipeline_rank: int) -> float:
    """FLOPs of a step on the first rank of a pipeline rank."""
    model = request.model
    step = candidate.step_shape(request)
    stages = rank_model_shards(step, step.first_rank(pipeline_rank))
    own = [layer for stage in stages for layer in stage.layer_range(model)]
    # Both halves of a split backward pass recompute, under ``selective`` the first alone; the first stage has one half.
    split = candidate.schedule in ZERO_BUBBLE and candidate.recompute == "full"
    twice = _layer_count(request, [stage for stage in stages if not stage.embedding]) if split else 0
    heads = sum(stage.head for stage in stages)
    tokens = candidate.micro_batch * request.sequence / candidate.context
    rows = len(vocabulary_rows(model, ModelShard(0, candidate.tensor)))
    head = 6 * tokens * rows * model.hidden_size
    blocks = len(own) * _layer_flops(request, candidate, tokens) + twice * _recomputed_flops(request, candidate, tokens)
    matrices = MatrixPlan(step, step.first_rank(pipeline_rank), own).flops()  # of the optimizer
    return candidate.accumulation(request.global_batch) * (blocks + heads * head) + matrices


def _layer_flops(request: PlanRequest, candidate: Candidate, tokens: float) -> float:
    """FLOPs of one layer for one micro-batch: forward, backward and one recomputation."""
    attention, matrix = _layer_elements(request, candidate)
    products = 6 * tokens * (attention + 3 * matrix)
    return (
        products
        + sum(_CORE_PRODUCTS.values()) * _core_flops(request, candidate, tokens)
        + _recomputed_flops(request, candidate, tokens)
    )


def _recomputed_flops(request: PlanRequest, candidate: Candidate, tokens: float) -> float:
    if candidate.recompute == "none":
        return 0.0
    attention, matrix = _layer_elements(request, candidate)
    # Recomputation stops before the last product, whose result is not needed.
    products = 2 * tokens * (attention + 2 * matrix) if candidate.recompute == "full" else 0.0
    return products + _CORE_PRODUCTS["forward"] * _core_flops(request, candidate, tokens)


def _layer_elements(request: PlanRequest, candidate: Candidate) -> tuple[float, float]:
    """Elements of the attention weights of one layer, and of one of the three feed-forward matrices."""
    model = request.model
    heads, keys = model.heads / candidate.tensor, max(model.n_kv_heads / candidate.tensor, 1.0)
    attention = model.hidden_size * model.n_head_dim * (2 * heads + 2 * keys)
    return attention, model.hidden_size * model.intermediate_size / candidate.tensor


def _core_flops(request: PlanRequest, candidate: Candidate, tokens: float) -> float:
    """FLOPs of one product over queries, positions and head width."""
    model = request.model
    return 2 * tokens * _attended_positions(request, candidate) * model.heads / candidate.tensor * model.n_head_dim


def _attended_positions(request: PlanRequest, candidate: Candidate) -> float:
    """Mean over all layers."""
    # Each context rank has two chunks of the sequence; a query attends to all positions up to the end of its chunk.
    chunks = 2 * candidate.context
    all_before = request.sequence * (chunks + 1) / (2 * chunks) if candidate.context > 1 else request.sequence
    windows = request.model.windows(request.sequence)
    return sum(all_before if window is None else window for window in windows) / len(windows)


def exchanged_bytes(request: PlanRequest, candidate: Candidate, pipeline_rank: int) -> dict[str, float]:
    """Bytes exchanged in a step, by axis. ``data`` includes the context axis, over which FSDP shards too."""
    step = candidate.step_shape(request)
    rank = step.first_rank(pipeline_rank)
    stages = rank_model_shards(step, rank)
    found = {
        "tensor": _tensor_bytes(request, candidate, stages),
        "context": _context_bytes(request, candidate, stages),
        "pipeline": _pipeline_bytes(request, candidate, pipeline_rank),
        "data": _data_bytes(request, candidate, rank, stages),
    }
    layers = [layer for stage in stages for layer in stage.layer_range(request.model)]
    exchange = MatrixPlan(step, rank, layers).message_bytes()  # whole matrices of the optimizer, by the first axis
    for axis in ("data", "context", "tensor"):
        if getattr(candidate, axis) > 1:
            found[axis] += exchange
            break
    return found


def _hidden_bytes(request: PlanRequest, candidate: Candidate) -> float:
    """Bytes of the hidden states of one micro-batch on a context rank."""
    tokens = candidate.micro_batch * request.sequence / candidate.context
    return tokens * request.model.hidden_size * MODES[request.mode].compute.itemsize


def _layer_count(request: PlanRequest, stages: list[ModelShard]) -> int:
    return sum(len(stage.layer_range(request.model)) for stage in stages)


def _tensor_bytes(request: PlanRequest, candidate: Candidate, stages: list[ModelShard]) -> float:
    if candidate.tensor == 1:
        return 0.0
    # Full recomputation repeats three of the four forward messages: the output of the block is not recomputed.
    repeated = 3 if candidate.recompute == "full" else 2 * candidate.parallel.gathers_again
    # Each half of a block gathers its input and scatters its output, forward and backward: 8 messages.
    messages = float(_layer_count(request, stages) * (8 + repeated))
    # Both halves of a split backward pass recompute; the first stage has only one half.
    if candidate.schedule in ZERO_BUBBLE:
        messages += _layer_count(request, [stage for stage in stages if not stage.embedding]) * repeated
    messages += sum(2 * stage.head for stage in stages)
    # The embedding's output has the dtype of its weights. FSDP2 gathers these in the compute dtype.
    mode = MODES[request.mode]
    sharded = candidate.zero > 0 and candidate.data * candidate.context > 1
    wider = 1.0 if sharded else mode.weights.itemsize / mode.compute.itemsize
    messages += sum(2 * stage.embedding * wider for stage in stages)
    return candidate.accumulation(request.global_batch) * messages * _hidden_bytes(request, candidate)


def _context_bytes(request: PlanRequest, candidate: Candidate, stages: list[ModelShard]) -> float:
    if candidate.context == 1:
        return 0.0
    model = request.model
    tokens = candidate.micro_batch * request.sequence
    heads = max(model.n_kv_heads / candidate.tensor, 1.0)
    keys = tokens * heads * model.n_head_dim * MODES[request.mode].compute.itemsize
    # Gathered forward, again in backward unless kept; the gradients are scattered once.
    times = {"none": 2, "selective": 3, "full": 3}[candidate.recompute]
    return candidate.accumulation(request.global_batch) * _layer_count(request, stages) * times * 2 * keys


def _pipeline_bytes(request: PlanRequest, candidate: Candidate, pipeline_rank: int) -> float:
    """Bytes that a rank sends: activations to the next stage, gradients to the previous one."""
    layout = candidate.step_shape(request).layout
    sends = sum(len(others) for _, others in layout.remote_neighbour_stages(pipeline_rank))
    return candidate.accumulation(request.global_batch) * sends * _hidden_bytes(request, candidate) / candidate.tensor


def _data_bytes(request: PlanRequest, candidate: Candidate, rank: int, stages: list[ModelShard]) -> float:
    if candidate.data * candidate.context == 1:
        return 0.0
    mode = MODES[request.mode]
    micro_batches = candidate.accumulation(request.global_batch)

    def state(zero: Literal[0, 1]) -> tuple[float, float]:
        """Elements of the parameters stored on the rank, and of those added when all blocks are gathered."""
        counted = state_bytes_of_shards(candidate.with_zero(zero).step_shape(request), rank, stages, 1, 1)
        return float(counted.parameters), float(counted.parameters_within_step - counted.parameters)

    if candidate.zero == 0:
        # ZeRO 0 all-reduces all gradients once.
        return state(0)[0] * mode.reduction.itemsize
    gathered = state(1)[1]
    ends = gathered_ends(candidate.step_shape(request), rank, stages)
    gathers = {1: gathered, 2: gathered, 3: micro_batches * (2 * (gathered - ends) + ends)}[candidate.zero]
    reductions = micro_batches if candidate.zero > 1 and candidate.pipeline == 1 else 1
    reduced = mode.reduction if mode.compute != mode.weights else mode.gradients
    # Replicas of a hybrid layout sum their shards of the gradients once.
    summed = gathered / candidate.shards if candidate.replicas > 1 else 0.0
    return gathers * mode.compute.itemsize + (reductions * gathered + summed) * reduced.itemsize
