"""The LLaMA family: norms before attention and before the feed-forward layer, which is SwiGLU.

    x -> attention_norm -> q, k, v -> (q_norm, k_norm) -> attention -> output -> +
      -> feed_forward_norm -> gate, up -> down -> +

Other architectures have the same blocks:

- Mistral (arXiv 2310.06825): attention to the last ``model.sliding_window`` tokens only. The window is part of the mask
  of attention within documents (``hlat.model.document_attention``), which all kernels, context parallelism and
  generation use.
- Qwen2 (arXiv 2407.10671): biases of queries, keys and values; ``model.qkv_bias`` is always true.
- Qwen3 (arXiv 2505.09388): norms of every query and key head before rotation; ``model.qk_norm`` is always true, biases
  (``model.qkv_bias``) are optional.
- Phi-3 (arXiv 2404.14219): fused matrices in files (``hlat.model.hf.packing``). In Phi-4-mini (arXiv 2503.01743) only
  the first part of each head is rotated (``model.rope.partial_rotary_factor``).
"""

from functools import lru_cache

from hlat.config import ModelConfig
from hlat.model.architectures.base import (
    ATTENTION_NORM,
    FEED_FORWARD_NORM,
    Architecture,
    NormPlace,
    block_class,
    decoder_spec,
    feed_forward,
    head_norms,
    output_projection,
    projections,
    saved_by_block,
)
from hlat.model.spec import ModelSpec


def llama_spec(config: ModelConfig) -> ModelSpec:
    """Describe a model with a norm before each half of a block, and with its options of the model section."""
    return _describe(config.tie_embeddings, config.coalesce, config.qkv_bias, config.qk_norm)


@lru_cache
def _describe(tie_embeddings: bool, coalesce: bool, qkv_bias: bool, qk_norm: bool) -> ModelSpec:
    block = (
        ATTENTION_NORM,
        *projections("weight", coalesce),
        *(projections("bias", coalesce) if qkv_bias else ()),
        *(head_norms() if qk_norm else ()),
        output_projection(),
        FEED_FORWARD_NORM,
        *feed_forward(coalesce),
    )
    return decoder_spec(block, saved_by_block(coalesce, qk_norm), tie_embeddings)


LLAMA = Architecture(llama_spec, block_class("layers:DecoderBlock"), NormPlace.INPUT)
