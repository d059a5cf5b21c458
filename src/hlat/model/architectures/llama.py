"""The LLaMA family: norms before attention and before the feed-forward layer, which is SwiGLU.

    x -> attention_norm -> q, k, v -> (q_norm, k_norm) -> attention -> output -> +
      -> feed_forward_norm -> gate, up -> down -> +

Three other architectures have the same blocks:

- Mistral (arXiv 2310.06825): attention to the last ``model.sliding_window`` tokens only. The window is part of the mask
  of attention within documents (``hlat.model.document_attention``), which all kernels, context parallelism and
  generation use.
- Qwen2 (arXiv 2407.10671): biases of queries, keys and values; ``model.qkv_bias`` is always true.
- Qwen3 (arXiv 2505.09388): norms of every query and key head before rotation; ``model.qk_norm`` is always true, biases
  (``model.qkv_bias``) are optional.
"""

from functools import lru_cache

from hlat.config import ModelConfig
from hlat.model.architectures.base import (
    Architecture,
    NormPlace,
    decoder_block,
    decoder_spec,
    feed_forward,
    head_norms,
    output_projection,
    projections,
    saved_by_attention,
    saved_by_feed_forward,
    saved_by_head_norms,
    stream_norm,
)
from hlat.model.spec import Axis, ModelSpec, SavedTensor


def llama_spec(config: ModelConfig) -> ModelSpec:
    """Describe a model with a norm before each half of a block, and with its options of the model section."""
    return _describe(config.tie_embeddings, config.coalesce, config.qkv_bias, config.qk_norm)


@lru_cache
def _describe(tie_embeddings: bool, coalesce: bool, qkv_bias: bool, qk_norm: bool) -> ModelSpec:
    block = (
        stream_norm(
            "attention_norm.weight", "input_layernorm.weight", step="attention_norm", freed_by="attention_input"
        ),
        *projections("weight", coalesce),
        *(projections("bias", coalesce) if qkv_bias else ()),
        *(head_norms() if qk_norm else ()),
        output_projection(),
        stream_norm(
            "feed_forward_norm.weight",
            "post_attention_layernorm.weight",
            step="feed_forward_norm",
            freed_by="feed_forward_input",
        ),
        *feed_forward(coalesce),
    )
    return decoder_spec(block, _saved(coalesce, qk_norm), tie_embeddings)


def _saved(coalesce: bool, qk_norm: bool) -> tuple[SavedTensor, ...]:
    """Describe the saved tensors: norms save their input, and a number for each token."""
    width = (Axis.WIDTH,)
    return (
        SavedTensor("x", axes=width, between=True),
        SavedTensor("attention_norm_scale", ("attention_input",), statistics=True, between=True),
        SavedTensor("attention_input", ("attention_input",), width),
        *saved_by_attention(),
        SavedTensor("residual", ("residual",), width, between=True),
        SavedTensor("feed_forward_norm_scale", ("feed_forward_input",), statistics=True, between=True),
        SavedTensor("feed_forward_input", ("feed_forward_input",), width),
        *saved_by_feed_forward(),
        *(saved_by_head_norms(coalesce) if qk_norm else ()),
    )


LLAMA = Architecture(llama_spec, decoder_block, NormPlace.INPUT)
