"""Dimensions of a published model; what a row does not state follows from the rest of it.

RowColumns -> widths, heads, gated or not, vocabulary -> ModelShape
"""

from dataclasses import replace

from hlat.planner.problem.workload import ModelShape
from published_runs.reader import Framework, Reading
from published_runs.row.columns import RowColumns

_VOCABULARIES = (16_000, 400_000)
"""Vocabularies that a number of parameters may leave; others follow from rounding, or it counts something else."""
_PADDED = 128
"""Vocabularies are padded to multiples of this many rows, times the tensor ranks (Megatron-LM's default)."""


def read_shape(columns: RowColumns, framework: Framework) -> ModelShape:
    """Read the dimensions of a decoder.

    Args:
        columns: the row.
        framework: its framework, which may pad the vocabulary.

    Raises:
        UnreadableError: a column is missing or not understood.
    """
    layers, hidden, heads = (columns.positive(column) for column in ("layers", "hidden", "heads"))
    inner, vocab, gated = columns.optional("ffn"), columns.optional("vocab"), columns.flag("gated_mlp")
    matrices = 1 if columns.flag("tied_embeddings") else 2
    if gated is None:
        gated = bool(inner) and inner != 4 * hidden
        reason = f"{'gated' if gated else 'plain'} feed-forward block, from its width"
        columns.keep(Reading("gated_mlp", "", gated, "assumed", reason, 0.05))
    if not inner:
        inner = round(8 * hidden / 3) if gated else 4 * hidden
        columns.keep(Reading("ffn", "", inner, "assumed", f"feed-forward width {inner}", 0.05))
    kv_heads = columns.optional("kv_heads")
    if not kv_heads:
        kv_heads = columns.keep(Reading("kv_heads", "", heads, "assumed", "as many kv heads as heads", 0.02))
    head_dim = columns.optional("head_dim") or hidden // heads
    shape = ModelShape(layers, hidden, heads, kv_heads, head_dim, inner, vocab, gated)
    multiple = _PADDED * (columns.optional("tp") or 1) if framework.pads_vocabulary else 1
    return replace(shape, vocab=-(-(vocab or _vocabulary(columns, shape, matrices)) // multiple) * multiple)


def _vocabulary(columns: RowColumns, shape: ModelShape, matrices: int) -> int:
    """A vocabulary that is not stated: what the stated number of parameters leaves, else a usual one.

    Args:
        columns: the row.
        shape: its other dimensions.
        matrices: 1 if the head is the embedding, else 2.
    """
    parameters = columns.optional("n_params")
    # Which of the next multiples of 128 it is does not follow from a rounded number.
    rest = (parameters - shape.layers * block_weights(shape)) / (matrices * shape.hidden)
    if _VOCABULARIES[0] <= rest <= _VOCABULARIES[1]:
        reason = f"vocabulary of {rest:,.0f}, from the number of parameters"
        return columns.keep(Reading("vocab", "", _PADDED * round(rest / _PADDED), "implied", reason, 0.03))
    return columns.keep(Reading("vocab", "", 50304, "assumed", "vocabulary of 50,304", 0.02))


def block_weights(shape: ModelShape) -> int:
    """Elements of the weight matrices of one layer."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    return attention + (2 + shape.gated) * shape.hidden * shape.intermediate
