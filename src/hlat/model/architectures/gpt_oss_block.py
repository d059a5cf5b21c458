"""Modules of gpt-oss: biases of what a block adds, and the clamped SwiGLU; its sinks are an option of attention."""

import torch
from torch import nn

from hlat.config import ModelConfig
from hlat.model.layers import Attention, DecoderBlock, FeedForward
from hlat.model.pointwise import CLAMPED_SWIGLU
from hlat.model.spec import FULL_MODEL, ModelShard


class GptOssAttention(Attention):
    """Attention with the bias of its output, which the block adds."""

    def __init__(self, config: ModelConfig, shard: ModelShard = FULL_MODEL) -> None:
        super().__init__(config, shard)
        self.output_bias = nn.Parameter(torch.empty(config.hidden_size))


class GptOssFeedForward(FeedForward):
    """Clamped SwiGLU with biases, of which the block adds the last."""

    activation, bias = CLAMPED_SWIGLU, True

    def __init__(self, config: ModelConfig, shard: ModelShard = FULL_MODEL) -> None:
        super().__init__(config, shard)
        self.down_bias = nn.Parameter(torch.empty(config.hidden_size))


class GptOssBlock(DecoderBlock):
    """One decoder block, whose output projections have biases."""

    attention_class, feed_forward_class = GptOssAttention, GptOssFeedForward

    # The outputs are complete sums here; in a tensor-parallel shard's projection every rank would add the bias.
    def after_attention(self, x_BSD: torch.Tensor, out_BSD: torch.Tensor) -> torch.Tensor:
        return super().after_attention(x_BSD, _with_bias(out_BSD, self.attention.output_bias))

    def after_feed_forward(self, x_BSD: torch.Tensor, out_BSD: torch.Tensor) -> torch.Tensor:
        return super().after_feed_forward(x_BSD, _with_bias(out_BSD, self.feed_forward.down_bias))


def _with_bias(out: torch.Tensor, bias: torch.Tensor | nn.Module) -> torch.Tensor:
    assert isinstance(bias, torch.Tensor), "one of the parameters above"
    return out + bias.to(out.dtype)
