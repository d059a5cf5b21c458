"""What the forward pass keeps for the backward pass, tensor by tensor, without any recomputation.

This is our implementation counted, not a formula from the literature: the pointwise functions keep what ``ops.py``
says, fused attention keeps its inputs, its output and one log-sum per row, a linear layer keeps its input. A tensor
kept by two consumers is counted once. ``mixed`` means fp32 weights under bf16 autocast: the residual stream, norm
statistics and log-sums are fp32, everything that enters a matrix product is bf16, and a bf16 copy of every weight
lives until backward.
"""

from dataclasses import dataclass
from typing import Literal

from hlat.config import ModelConfig
from hlat.model.counts import count_parameters

Mode = Literal["fp32", "mixed"]
_FP32, _BF16 = 4, 2


@dataclass(frozen=True)
class Activations:
    """Bytes kept for backward by one micro-batch.

    Attributes:
        layer: of one decoder block, by tensor; "x" names what enters and "residual" what leaves its attention half.
        ends: of what is not in a block, by tensor: token ids, the final norm and the head's input. The loss keeps
            logits of its own besides.
        weight_copies: bf16 copies of the weights of the whole model (mixed only).
        layers: number of blocks.
    """

    layer: dict[str, int]
    ends: dict[str, int]
    weight_copies: int
    layers: int

    @property
    def per_layer(self) -> int:
        """Bytes of one block."""
        return sum(self.layer.values())

    @property
    def total(self) -> int:
        """Bytes of the whole model, weight copies included."""
        return self.layers * self.per_layer + sum(self.ends.values()) + self.weight_copies


def activations(config: ModelConfig, batch: int, sequence_length: int, mode: Mode = "fp32") -> Activations:
    """Bytes kept by a forward pass over ``batch`` sequences of ``sequence_length`` tokens on one device."""
    tokens, wide = batch * sequence_length, _FP32
    narrow = _FP32 if mode == "fp32" else _BF16
    layer = {name: tokens * count for name, count in _layer_bytes(config, wide, narrow).items()}
    width = config.hidden_size
    ends = {
        "token_ids": tokens * 8,
        "final_norm": tokens * wide * (width + 1),
        "head_input": tokens * narrow * width,
    }
    return Activations(layer, ends, _BF16 * count_parameters(config).matmul if mode == "mixed" else 0, config.layers)


def _layer_bytes(config: ModelConfig, wide: int, narrow: int) -> dict[str, int]:
    """Bytes per token of one block, by tensor."""
    width, inner, head_dim = config.hidden_size, config.intermediate_size, config.n_head_dim
    heads, kv_heads = config.heads, config.n_kv_heads
    kept = {
        "x": wide * width,
        "attention_norm_scale": wide,
        "attention_input": narrow * width,
        "q": narrow * heads * head_dim,
        "k": narrow * kv_heads * head_dim,
        "v": narrow * kv_heads * head_dim,
        "attention_output": narrow * heads * head_dim,
        "attention_log_sum": _FP32 * heads,
        "residual": wide * width,
        "feed_forward_norm_scale": wide,
        "feed_forward_input": narrow * width,
        "gate_up": narrow * 2 * inner,
        "inner": narrow * inner,
    }
    if config.qk_norm:
        # The norms keep their inputs; fused, these are slices that keep the whole projection alive.
        projected = heads + (2 if config.coalesce else 1) * kv_heads
        kept["qk_norm_input"] = narrow * projected * head_dim
        kept["qk_norm_scale"] = wide * (heads + kv_heads)
    return kept
