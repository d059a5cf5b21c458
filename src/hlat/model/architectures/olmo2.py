"""OLMo 2 (arXiv 2501.00656): norms after attention and after the feed-forward layer, and of all queries and all keys.

    x -> q, k, v -> q_norm, k_norm -> attention -> output -> attention_norm -> +
      -> gate, up -> down -> feed_forward_norm -> +

The norms of queries and keys extend over the complete width of all heads.
"""

from functools import lru_cache

from hlat.model.architectures.base import (
    Architecture,
    NormPlace,
    block_class,
    decoder_spec,
    feed_forward,
    output_projection,
    projections,
    saved_by_attention,
    saved_by_feed_forward,
    stream_norm,
)
from hlat.model.spec import Axis, Component, GradientSum, Initial, ModelSpec, ParameterSpec, SavedTensor, TensorSpec


@lru_cache
def _describe(tie_embeddings: bool, coalesce: bool) -> ModelSpec:
    block = (
        *projections("weight", coalesce),
        _width_norm("q_norm.weight", Axis.QUERIES, GradientSum.NONE),
        _width_norm("k_norm.weight", Axis.KEYS, GradientSum.KEY_COPIES),
        output_projection(is_added=False),
        stream_norm(
            "attention_norm.weight",
            "post_attention_layernorm.weight",
            step="attention_norm",
            freed_by="residual",
            is_added=True,
        ),
        *feed_forward(coalesce, is_added=False),
        stream_norm(
            "feed_forward_norm.weight", "post_feedforward_layernorm.weight", step="feed_forward_norm", is_added=True
        ),
    )
    return decoder_spec(block, _saved(), tie_embeddings)


def _width_norm(name: str, heads: Axis, gradient_sum: GradientSum) -> ParameterSpec:
    """Describe a norm over all heads of queries or keys, whose weight is sharded with them."""
    tensor = TensorSpec(f"self_attn.{name}", heads, None, Component.NORMS, Initial.ONES, gradient_sum)
    return ParameterSpec(f"attention.{name}", (tensor,), step="qk_norm", freed_by="qkv")


def _saved() -> tuple[SavedTensor, ...]:
    # The residual stream itself is the input of attention and of the feed-forward layer.
    width = (Axis.WIDTH,)
    return (
        SavedTensor("x", axes=width, between=True, source_of=("attention_input", "residual")),
        SavedTensor("attention_input", ("attention_input",), width, gathers="x"),
        SavedTensor("qk_norm_input", ("qkv",), (Axis.QUERIES, Axis.KEYS)),
        SavedTensor("q_norm_scale", ("qkv",), statistics=True),
        SavedTensor("k_norm_scale", ("qkv",), statistics=True),
        *saved_by_attention(),
        SavedTensor("attention_result", ("residual",), width, between=True),
        SavedTensor("attention_norm_scale", ("residual",), statistics=True, between=True),
        SavedTensor("residual", ("residual",), width, between=True, source_of=("feed_forward_input",)),
        SavedTensor("feed_forward_input", ("feed_forward_input",), width, gathers="residual"),
        *saved_by_feed_forward(),
        # Saved by its norm, and never recomputed: that would take one more product than other blocks.
        SavedTensor("feed_forward_result", axes=width, between=True),
        SavedTensor("feed_forward_norm_scale", statistics=True, between=True),
    )


OLMO2 = Architecture(
    lambda config: _describe(config.tie_embeddings, config.coalesce),
    block_class("architectures.olmo2_block:Olmo2Block"),
    NormPlace.OUTPUT,
)
