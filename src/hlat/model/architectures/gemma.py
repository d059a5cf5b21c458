"""Gemma 2 (arXiv 2408.00118) and 3, text (arXiv 2503.19786): norms of 1 + w before and after each half of a block.

    x -> attention_norm -> q, k, v -> (q_norm, k_norm) -> attention -> output -> attention_output_norm -> +
      -> feed_forward_norm -> gate, up -> down -> feed_forward_output_norm -> +

Embeddings are multiplied by the square root of their width. The feed-forward layer is GeGLU. Gemma 2 caps scores of
attention and logits (``model.attn_logit_softcapping``), Gemma 3 has norms of queries and keys in their place.
"""

from functools import lru_cache

from hlat.model.architectures.base import (
    Architecture,
    block_class,
    decoder_spec,
    feed_forward,
    head_norms,
    output_projection,
    projections,
    saved_by_block,
    stream_norm,
)
from hlat.model.spec import Initial, ModelSpec, ParameterSpec


@lru_cache
def _describe(tie_embeddings: bool, coalesce: bool, qk_norm: bool) -> ModelSpec:
    block = (
        _norm("attention", "input", "attention_input"),
        *projections("weight", coalesce),
        *(head_norms(Initial.ZEROS) if qk_norm else ()),
        output_projection(is_added=False),
        _norm("attention_output", "post_attention", "residual", is_added=True),
        _norm("feed_forward", "pre_feedforward", "feed_forward_input"),
        *feed_forward(coalesce, is_added=False),
        _norm("feed_forward_output", "post_feedforward", "", is_added=True),
    )
    return decoder_spec(block, saved_by_block(coalesce, qk_norm, output_norms=True), tie_embeddings, norm=Initial.ZEROS)


def _norm(name: str, canonical: str, freed_by: str, is_added: bool = False) -> ParameterSpec:
    names = f"{name}_norm.weight", f"{canonical}_layernorm.weight", f"{name}_norm"
    return stream_norm(*names, freed_by, Initial.ZEROS, is_added)


GEMMA = Architecture(
    lambda config: _describe(config.tie_embeddings, config.coalesce, config.qk_norm),
    block_class("architectures.gemma_block:GemmaBlock"),
    scales_embedding=True,
)
