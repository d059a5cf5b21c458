"""Modules of Gemma: norms that multiply by 1 + w, before and after each half of a block, and a GeGLU layer."""

import torch

from hlat.config import ModelConfig
from hlat.model.layers import Attention, DecoderBlock, FeedForward, RMSNorm
from hlat.model.pointwise import GELU_TANH
from hlat.model.rope import RopeTables
from hlat.model.spec import FULL_MODEL, ModelShard


class GemmaNorm(RMSNorm):
    """Root-mean-square norm that multiplies by 1 + weight."""

    offset = 1.0


class GemmaFeedForward(FeedForward):
    """GeGLU: down(gelu(gate(x)) * up(x))."""

    activation = GELU_TANH


class GemmaAttention(Attention):
    """Attention whose scores may have another scale than one by the width of a head."""

    norm_class = GemmaNorm

    def __init__(self, config: ModelConfig, shard: ModelShard = FULL_MODEL) -> None:
        super().__init__(config, shard)
        # Kernels divide scores by the square root of the head's width.
        self._factor = (config.n_head_dim / (config.query_pre_attn_scalar or config.n_head_dim)) ** 0.5

    def project(
        self, x_BSD: torch.Tensor, tables: RopeTables | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_BHSE, k_BGSE, v_BGSE = super().project(x_BSD, tables)
        return (q_BHSE if self._factor == 1.0 else q_BHSE * self._factor), k_BGSE, v_BGSE


class GemmaBlock(DecoderBlock):
    """One decoder block, with norms of the input and of the output of attention and of the feed-forward layer."""

    attention_class, feed_forward_class, norm_class = GemmaAttention, GemmaFeedForward, GemmaNorm

    def __init__(self, config: ModelConfig, shard: ModelShard = FULL_MODEL) -> None:
        super().__init__(config, shard)
        self.attention_output_norm = GemmaNorm(config.hidden_size, config.norm_eps)
        self.feed_forward_output_norm = GemmaNorm(config.hidden_size, config.norm_eps)

    def after_attention(self, x_BSD: torch.Tensor, out_BSD: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.attention_output_norm(out_BSD)
        return x_BSD + added

    def after_feed_forward(self, x_BSD: torch.Tensor, out_BSD: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.feed_forward_output_norm(out_BSD)
        return x_BSD + added
