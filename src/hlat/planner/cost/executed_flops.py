"""FLOPs that a rank executes in a step: those of the model that fall to it, and what is computed again.

    PlanRequest, Candidate, pipeline rank -> FLOPs of matrix products and of attention

Counted as a rehearsal counts them (rehearsal/flops.py): a multiply-add is two, attention counts all pairs of positions
that its kernel is given, its backward computes the scores again. Held against rehearsals in a test, to the last one.
"""

from hlat.config.sections import ZERO_BUBBLE
from hlat.model import ModelPart, vocabulary_rows
from hlat.parallel.stages import held_parts
from hlat.planner.problem import Candidate, PlanRequest

_CORE = {"forward": 2, "backward": 5}  # products of queries by positions by head width: flash attention's


def executed_flops(request: PlanRequest, one: Candidate, pipeline_rank: int) -> float:
    """FLOPs of a step on the rank at this place of the pipeline."""
    model = request.model
    cut = one.cut(request)
    parts = held_parts(cut, cut.first_rank(pipeline_rank))
    layers = sum(len(part.layer_range(model)) for part in parts)
    # Of a backward pass that is taken apart each part computes again; the first stage's has one part only.
    twice = sum(len(part.layer_range(model)) for part in parts if not part.embedding) if _apart(one) else 0
    heads = sum(part.head for part in parts)
    tokens = one.micro_batch * request.sequence / one.context
    rows = len(vocabulary_rows(model, ModelPart(0, one.tensor)))
    head = 6 * tokens * rows * model.hidden_size
    blocks = layers * _layer(request, one, tokens) + twice * _again(request, one, tokens)
    return one.accumulation(request.global_batch) * (blocks + heads * head)


def _apart(one: Candidate) -> bool:
    """Whether both parts of a backward pass need all that is computed again; of ``selective`` only the first does."""
    return one.schedule in ZERO_BUBBLE and one.recompute == "full"


def _layer(request: PlanRequest, one: Candidate, tokens: float) -> float:
    """Of one micro-batch in one layer, forward and backward, computed again once."""
    attention, matrix = _weights(request, one)
    products = 6 * tokens * (attention + 3 * matrix)
    return products + sum(_CORE.values()) * _core(request, one, tokens) + _again(request, one, tokens)


def _again(request: PlanRequest, one: Candidate, tokens: float) -> float:
    """What leaves a block is not needed again: recomputation ends before its last product."""
    if one.recompute == "none":
        return 0.0
    attention, matrix = _weights(request, one)
    products = 2 * tokens * (attention + 2 * matrix) if one.recompute == "full" else 0.0
    return products + _CORE["forward"] * _core(request, one, tokens)


def _weights(request: PlanRequest, one: Candidate) -> tuple[float, float]:
    """Of attention in one layer, and of one of the three matrices of its feed-forward half."""
    model = request.model
    heads, keys = model.heads / one.tensor, max(model.n_kv_heads / one.tensor, 1.0)
    attention = model.hidden_size * model.n_head_dim * (2 * heads + 2 * keys)
    return attention, model.hidden_size * model.intermediate_size / one.tensor


def _core(request: PlanRequest, one: Candidate, tokens: float) -> float:
    """One product of queries, positions and the width of heads."""
    model = request.model
    return 2 * tokens * _positions(request, one) * model.heads / one.tensor * model.n_head_dim


def _positions(request: PlanRequest, one: Candidate) -> float:
    """Attended to by each query: all; of a context rank's two chunks each those up to its own end."""
    chunks = 2 * one.context
    return request.sequence * (chunks + 1) / (2 * chunks) if one.context > 1 else request.sequence
