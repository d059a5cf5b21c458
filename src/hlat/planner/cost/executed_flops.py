"""FLOPs that a rank executes in a step: its share of the model's, recomputation, and whole matrices of the optimizer.

    PlanRequest, Candidate, pipeline rank -> FLOPs of matrix products and attention

Counted as a rehearsal counts them (rehearsal/flop_counter.py): a multiply-add is two FLOPs; attention counts all pairs
of positions that its kernel computes; its backward pass recomputes the scores. A test compares the counts with
rehearsals; they are equal.
"""

from hlat.config import ZERO_BUBBLE
from hlat.model import ModelShard, vocabulary_rows
from hlat.parallel import MatrixPlan, rank_model_shards
from hlat.planner.problem.layouts import Candidate
from hlat.planner.problem.request import PlanRequest

_CORE = {"forward": 2, "backward": 5}  # flash attention's products of (queries x positions x head width)


def executed_flops(request: PlanRequest, candidate: Candidate, pipeline_rank: int) -> float:
    """FLOPs of a step on the first rank of a pipeline rank."""
    model = request.model
    step = candidate.step_shape(request)
    stages = rank_model_shards(step, step.first_rank(pipeline_rank))
    layers = sum(len(stage.layer_range(model)) for stage in stages)
    # Both halves of a split backward pass recompute; the first stage has only one half.
    split = [stage for stage in stages if not stage.embedding] if _recomputes_twice(candidate) else []
    twice = sum(len(stage.layer_range(model)) for stage in split)
    heads = sum(stage.head for stage in stages)
    tokens = candidate.micro_batch * request.sequence / candidate.context
    rows = len(vocabulary_rows(model, ModelShard(0, candidate.tensor)))
    head = 6 * tokens * rows * model.hidden_size
    blocks = layers * _layer(request, candidate, tokens) + twice * _recomputed(request, candidate, tokens)
    own = [layer for stage in stages for layer in stage.layer_range(model)]
    matrices = MatrixPlan(step, step.first_rank(pipeline_rank), own).flops()  # of the optimizer
    return candidate.accumulation(request.global_batch) * (blocks + heads * head) + matrices


def _recomputes_twice(candidate: Candidate) -> bool:
    """True if both halves of a backward pass recompute the block; under ``selective`` only the first does."""
    return candidate.schedule in ZERO_BUBBLE and candidate.recompute == "full"


def _layer(request: PlanRequest, candidate: Candidate, tokens: float) -> float:
    """FLOPs of one layer for one micro-batch: forward, backward and one recomputation."""
    attention, matrix = _weights(request, candidate)
    products = 6 * tokens * (attention + 3 * matrix)
    return products + sum(_CORE.values()) * _core(request, candidate, tokens) + _recomputed(request, candidate, tokens)


def _recomputed(request: PlanRequest, candidate: Candidate, tokens: float) -> float:
    """FLOPs of recomputing one layer. It stops before the last product, whose result is not needed."""
    if candidate.recompute == "none":
        return 0.0
    attention, matrix = _weights(request, candidate)
    products = 2 * tokens * (attention + 2 * matrix) if candidate.recompute == "full" else 0.0
    return products + _CORE["forward"] * _core(request, candidate, tokens)


def _weights(request: PlanRequest, candidate: Candidate) -> tuple[float, float]:
    """Elements of the attention weights of one layer, and of one of the three feed-forward matrices."""
    model = request.model
    heads, keys = model.heads / candidate.tensor, max(model.n_kv_heads / candidate.tensor, 1.0)
    attention = model.hidden_size * model.n_head_dim * (2 * heads + 2 * keys)
    return attention, model.hidden_size * model.intermediate_size / candidate.tensor


def _core(request: PlanRequest, candidate: Candidate, tokens: float) -> float:
    """FLOPs of one product over queries, positions and head width."""
    model = request.model
    return 2 * tokens * _positions(request, candidate) * model.heads / candidate.tensor * model.n_head_dim


def _positions(request: PlanRequest, candidate: Candidate) -> float:
    """Positions that each query attends to: a window, all, or with context parallelism those up to its chunk's end."""
    window = request.model.window(request.sequence)
    if window is not None:
        return window
    chunks = 2 * candidate.context
    return request.sequence * (chunks + 1) / (2 * chunks) if candidate.context > 1 else request.sequence
