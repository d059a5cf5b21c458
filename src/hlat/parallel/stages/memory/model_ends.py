"""Memory outside of the blocks: head and loss, whose gradients are computed in forward, and the embedding's gradient.

    final norm -> (gather) -> chunks of: logits -> loss, gradient by logits -> gradients by hidden and by the head
    gradient by the first block's input -> (gather, mask) -> gradient by the embedding

The lists of tensors follow ``model/loss.py``, ``model/matmul.py`` and ``parallel/vocab_parallel.py``.
"""

from dataclasses import dataclass

from hlat.config import ModelConfig
from hlat.model import HEAD_ROWS, CrossEntropy, ModelShard, vocabulary_rows

_FP32 = 4


@dataclass(frozen=True)
class EndTensors:
    """Sizes outside of the blocks, for one micro-batch on one rank.

    Attributes:
        model: the complete model.
        tensor: number of tensor-parallel ranks.
        tokens: tokens of a micro-batch on the rank.
        item: bytes of an activation element.
        stored: bytes of a weight element as it reaches the module.
        gathers: True with sequence parallelism.
        reorders: True if gathered sequences are copied into another order: of several rows.
        rounds: True if the embedding's gradient is accumulated in fp32 where its weights are bf16.
        fused: True if norms need no temporary tensors, and the gradient by logits overwrites them.
    """

    model: ModelConfig
    tensor: int
    tokens: float
    item: int
    stored: int
    gathers: bool
    reorders: bool
    rounds: bool
    fused: bool = False

    @property
    def inside(self) -> float:
        """Bytes of hidden states, (B, S, D)."""
        return self.tokens * self.item * self.model.hidden_size

    @property
    def stream(self) -> float:
        """Bytes of the residual stream; sharded with sequence parallelism."""
        return self.inside / (self.tensor if self.gathers else 1)

    @property
    def matrix(self) -> float:
        """Elements of the head or of the embedding."""
        return len(vocabulary_rows(self.model, ModelShard(0, self.tensor))) * float(self.model.hidden_size)


def loss_peak(ends: EndTensors) -> float:
    """Compute the most bytes that head and loss have in the forward pass, beyond what the final norm saves."""
    rows, item = len(vocabulary_rows(ends.model, ModelShard(0, ends.tensor))), ends.item
    chunk = min(ends.tokens, CrossEntropy().chunk(rows, ends.model.hidden_size))
    whole = 2 * ends.inside + (ends.stream if ends.gathers else 0.0)  # hidden states, the gradient by them, their shard
    if item != ends.stored:
        whole += ends.matrix * item  # the head, cast
    # Logits in fp32, and their gradient; fp32 logits are overwritten.
    logit = item + (_FP32 + item if item < _FP32 and not ends.fused else 0)
    if ends.tokens <= chunk:
        term = ends.matrix * item
        rounded = term + (ends.matrix * ends.stored if item != ends.stored else 0)
        return whole + max(chunk * rows * logit, chunk * rows * item + term, rounded)
    # The second chunk adds to the first chunk's gradient by the head, which is rounded at the end.
    accumulated = ends.matrix * _FP32
    term = min(rows, HEAD_ROWS) * ends.model.hidden_size * item if item < _FP32 else 0.0
    second = min(chunk, ends.tokens - chunk)
    rounded = accumulated + (ends.matrix * ends.stored if ends.stored < _FP32 else 0.0)
    adding = accumulated + chunk * rows * item + term
    return whole + max(chunk * rows * logit, adding, accumulated + second * rows * logit, rounded)


def loss_backward_bytes(ends: EndTensors) -> float:
    """Bytes of the gradients by hidden states and head, which are multiplied by the gradient by the loss."""
    return ends.inside + ends.matrix * ends.stored


def final_norm_peak(ends: EndTensors) -> float:
    """Compute the most bytes of the final norm's backward pass: gradients by its output and input, fp32 tensors."""
    if ends.fused:
        return 2 * ends.stream
    wide = ends.stream * _FP32 / ends.item
    return ends.stream + (4 * wide + ends.stream if ends.item < _FP32 else 3 * wide)


def embedding_peak(ends: EndTensors) -> float:
    """Compute the most bytes while the embedding's gradient is computed: the gradient by its output and by itself."""
    gradient = ends.stream
    peak = gradient
    if ends.gathers:
        peak = gradient + ends.inside * (2 if ends.reorders else 1)
    if ends.tensor > 1:  # tokens of other ranks' rows are masked
        peak = max(peak, 2 * ends.inside)
    gradient = ends.inside
    wide = ends.inside * _FP32 / ends.item
    if ends.stored == _FP32:
        cast = wide if ends.item < _FP32 else 0.0
        return max(peak, gradient + cast + ends.matrix * _FP32)
    if ends.rounds:
        return max(peak, gradient + wide + ends.matrix * _FP32, gradient + ends.matrix * (_FP32 + ends.stored))
    return max(peak, gradient + ends.matrix * ends.stored)
