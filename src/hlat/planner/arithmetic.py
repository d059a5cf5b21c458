"""FLOPs that a rank executes in a step: those of the model that fall to it, and what is computed again.

    Question, Candidate, pipeline rank -> FLOPs of matrix products and of attention

Counted as a rehearsal counts them (rehearsal/flops.py): a multiply-add is two, attention counts all pairs of positions
that its kernel is given, its backward computes the scores again. Held against rehearsals in a test, to the last one.
"""

from hlat.model import ModelPart, vocabulary_rows
from hlat.parallel import Layout, held_parts
from hlat.planner.layouts import Candidate
from hlat.planner.question import Question

_CORE = {"forward": 2, "backward": 5}  # products of queries by positions by head width: flash attention's


def executed_flops(question: Question, one: Candidate, pipeline_rank: int) -> float:
    """FLOPs of a step on the rank at this place of the pipeline."""
    model = question.model
    layout = Layout.of(one.parallel, one.world)
    parts = held_parts(model, layout, pipeline_rank * (one.world // one.pipeline), question.sequence)
    layers = sum(len(part.layer_range(model)) for part in parts)
    heads = sum(part.head for part in parts)
    tokens = one.micro_batch * question.sequence / one.context
    rows = len(vocabulary_rows(model, ModelPart(0, one.tensor)))
    head = 6 * tokens * rows * model.hidden_size
    return one.accumulation(question.global_batch) * (layers * _layer(question, one, tokens) + heads * head)


def _layer(question: Question, one: Candidate, tokens: float) -> float:
    """Of one micro-batch in one layer, forward and backward."""
    model = question.model
    heads, keys = model.heads / one.tensor, max(model.n_kv_heads / one.tensor, 1.0)
    attention = model.hidden_size * model.n_head_dim * (2 * heads + 2 * keys)
    matrix = model.hidden_size * model.intermediate_size / one.tensor
    core = 2 * tokens * _positions(question, one) * heads * model.n_head_dim
    # What leaves a block is not needed again: recomputation ends before its last product.
    again = {"none": 0.0, "selective": 0.0, "full": 2 * tokens * (attention + 2 * matrix)}[one.recompute]
    again += 0.0 if one.recompute == "none" else _CORE["forward"] * core
    return 6 * tokens * (attention + 3 * matrix) + sum(_CORE.values()) * core + again


def _positions(question: Question, one: Candidate) -> float:
    """Attended to by each query: all; of a context rank's two chunks each those up to its own end."""
    chunks = 2 * one.context
    return question.sequence * (chunks + 1) / (2 * chunks) if one.context > 1 else question.sequence
