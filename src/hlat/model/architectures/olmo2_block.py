"""Modules of OLMo 2: norms of all queries and keys, and of what a block adds to the residual stream."""

import torch

from hlat.config import ModelConfig
from hlat.model.layers import Attention, DecoderBlock, ShardedRMSNorm
from hlat.model.spec import FULL_MODEL, ModelShard, kv_replication, shard_heads


class Olmo2Attention(Attention):
    """Attention with norms over all queries and over all keys."""

    def __init__(self, config: ModelConfig, shard: ModelShard = FULL_MODEL) -> None:
        super().__init__(config, shard)
        here, size = shard_heads(config, shard), config.n_head_dim
        # Elements of copied kv heads would count several times in the sum over shards.
        copies = kv_replication(config, shard.tensor_count)
        self.q_norm = ShardedRMSNorm(here.queries * size, config.heads * size, 1, config.norm_eps)
        self.k_norm = ShardedRMSNorm(here.kvs * size, config.n_kv_heads * size, copies, config.norm_eps)


class Olmo2Block(DecoderBlock):
    """One decoder block, with norms of what attention and the feed-forward layer add to the residual stream."""

    attention_class = Olmo2Attention

    def before_attention(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return x_BSD

    def after_attention(self, x_BSD: torch.Tensor, out_BSD: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.attention_norm(out_BSD)
        return x_BSD + added

    def before_feed_forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return x_BSD

    def after_feed_forward(self, x_BSD: torch.Tensor, out_BSD: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.feed_forward_norm(out_BSD)
        return x_BSD + added
