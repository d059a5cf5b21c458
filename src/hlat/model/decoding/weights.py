"""Weights of a decoder as the compiled step reads them: contiguous, in the dtype of the activations.

    blocks of a decoder --their own memory, or a copy in the dtype of its products--> a ``StepLayer``

Which weights a block has follows from its modules: fused or split projections, biases, norms of queries and keys.
"""

import torch
from torch import nn

from hlat.model.architectures.base import NormPlace
from hlat.model.kernels.decode import StepArguments, StepLayer
from hlat.model.layers import Attention, DecoderBlock, FeedForward, RMSNorm, ShardedRMSNorm
from hlat.model.matmul import Linear


class StepWeights:
    """Weights of blocks and final norm, and what ``StepArguments`` say about their shapes.

    Args:
        blocks: all blocks of a complete model.
        norm: the final norm.
        place: where the norms of blocks are.
        dtype: dtype of the activations.

    Attributes:
        step: a step with everything that is the same for all calls.
        fused: number of columns of q, k and v together.
        heads: number of columns of q.
        inner: number of columns of the feed-forward layer.
    """

    def __init__(self, blocks: list[DecoderBlock], norm: nn.Module, place: NormPlace, dtype: torch.dtype) -> None:
        self._dtype, self._kept = dtype, list[torch.Tensor]()
        first = blocks[0]
        self.step = StepArguments(layers=len(blocks))
        self._layers = (StepLayer * len(blocks))(*(self._layer(block, place) for block in blocks))
        self.step.layer = self._layers
        self.step.final_norm, self.step.eps = self._norm(norm), first.attention_norm.eps
        self._describe_attention(first.attention)
        self._describe_feed_forward(first.feed_forward)
        self.step.width = first.attention_norm.weight.numel()

    def _layer(self, block: DecoderBlock, place: NormPlace) -> StepLayer:
        attention, feed_forward = block.attention, block.feed_forward
        layer = StepLayer(output=self._keep(attention.output.weight), down=self._keep(feed_forward.down.weight))
        norms = self._norm(block.attention_norm), self._norm(block.feed_forward_norm)
        if place is NormPlace.INPUT:
            layer.before_attention, layer.before_feed_forward = norms
        else:
            layer.after_attention, layer.after_feed_forward = norms
        layer.q_norm, layer.k_norm = self._norm(attention.q_norm), self._norm(attention.k_norm)
        for part, projection in enumerate(_projections(attention)):
            layer.qkv[part] = self._keep(projection.weight)
            layer.qkv_bias[part] = None if projection.bias is None else self._keep(projection.bias)
        if feed_forward.coalesce:
            layer.gate = self._keep(feed_forward.gate_up.weight)
            layer.up = layer.gate + feed_forward.block * feed_forward.gate_up.in_features * self._dtype.itemsize
        else:
            layer.gate, layer.up = self._keep(feed_forward.gate.weight), self._keep(feed_forward.up.weight)
        return layer

    def _norm(self, norm: nn.Module) -> int | None:
        return self._keep(norm.weight) if isinstance(norm, RMSNorm | ShardedRMSNorm) else None

    def _keep(self, weight: torch.Tensor) -> int:
        """Return the address of a weight, or of its copy in the dtype of the activations, and keep it."""
        self._kept.append(weight.detach().to(self._dtype).contiguous())
        return self._kept[-1].data_ptr()

    def _describe_attention(self, attention: Attention) -> None:
        step, width, share = self.step, attention.head_dim, attention.heads_per_group
        parts = [projection.out_features for projection in _projections(attention)]
        self.fused, self.heads = sum(parts), attention.output.in_features
        step.heads, step.head_width = self.heads // width, width
        step.groups = step.heads // share
        step.parts, step.part_rows, step.qkv_rows = len(parts), type(step.part_rows)(*parts), self.fused
        if attention.coalesce:  # a group of query heads, its key and its value follow each other
            step.q_step, step.kv_step = ((share + 2) * width,) * 2
            step.k_start, step.v_start = share * width, (share + 1) * width
        else:
            step.q_step, step.kv_step = share * width, width
            step.k_start, step.v_start = parts[0], parts[0] + parts[1]
        step.whole_norms = isinstance(attention.q_norm, ShardedRMSNorm)
        step.scale = width**-0.5

    def _describe_feed_forward(self, feed_forward: FeedForward) -> None:
        self.inner = self.step.inner = feed_forward.down.in_features
        self.step.gate_block = feed_forward.block
        self.step.gate_step = 2 * feed_forward.block if feed_forward.coalesce else feed_forward.block


def _projections(attention: Attention) -> list[Linear]:
    return [attention.qkv] if attention.coalesce else [attention.q, attention.k, attention.v]
