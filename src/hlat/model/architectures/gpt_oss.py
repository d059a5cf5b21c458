"""gpt-oss (arXiv 2508.10925) with dense feed-forward layers: sinks of attention, and biases of every projection.

    x -> attention_norm -> q, k, v -> attention, sinks -> output + bias -> +
      -> feed_forward_norm -> gate, up -> clamped SwiGLU -> down + bias -> +

A dense layer is one expert. Biases of what is added to the residual stream are added to sums over tensor ranks.
"""

from functools import lru_cache

from hlat.model.architectures.base import (
    ATTENTION_NORM,
    FEED_FORWARD_NORM,
    Architecture,
    added_bias,
    block_class,
    decoder_spec,
    feed_forward,
    gate_up,
    output_projection,
    projections,
    saved_by_block,
    sinks,
)
from hlat.model.spec import Component, ModelSpec


@lru_cache
def _describe(tie_embeddings: bool, coalesce: bool) -> ModelSpec:
    block = (
        ATTENTION_NORM,
        *projections("weight", coalesce),
        *projections("bias", coalesce),
        sinks(),
        output_projection(),
        added_bias("attention.output_bias", "self_attn.o_proj.bias", Component.ATTENTION),
        FEED_FORWARD_NORM,
        *gate_up("bias", coalesce),
        *feed_forward(coalesce),
        added_bias("feed_forward.down_bias", "mlp.down_proj.bias", Component.FEED_FORWARD),
    )
    return decoder_spec(block, saved_by_block(coalesce, qk_norm=False), tie_embeddings)


GPT_OSS = Architecture(
    lambda config: _describe(config.tie_embeddings, config.coalesce),
    block_class("architectures.gpt_oss_block:GptOssBlock"),
)
