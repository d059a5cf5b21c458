"""A decoder whose attention and feed-forward layer run side by side, as in GPT-J and GPT-NeoX, with RMS norms.

x -> attention_norm -> attention -------+
  -> feed_forward_norm -> feed_forward -+-> + x
"""

from dataclasses import replace

import torch

from hlat.config import Section
from hlat.model import DecoderBlock
from hlat.model.architectures.base import Architecture
from hlat.model.architectures.llama import llama_spec
from hlat.model.spec import Axis


class Options(Section):
    """Fields of its own in the model section."""

    residual_scale: float = 1.0


class ParallelBlock(DecoderBlock):
    """A block of two halves with the same input; between them the stream holds the sum so far, and that input."""

    def __init__(self, config, shard):
        super().__init__(config, shard)
        self._scale = Options(**config.own_options).residual_scale

    def after_attention(self, x, out):
        return torch.cat((x + out * self._scale, x), dim=-1)

    def before_feed_forward(self, x):
        return self.feed_forward_norm(x[..., x.shape[-1] // 2 :])

    def after_feed_forward(self, x, out):
        return x[..., : x.shape[-1] // 2] + out * self._scale


def describe(config):
    """Describe the parameters, which are LLaMA's, and the tensors that are kept for backward."""
    spec, twice = llama_spec(config), (Axis.WIDTH, Axis.WIDTH)
    saved = (replace(each, axes=twice) if each.name == "residual" else each for each in spec.saved)
    return replace(spec, saved=tuple(saved))


PARALLEL_BLOCK = Architecture(describe, lambda: ParallelBlock, Options=Options)
