"""The decoder block: RMSNorm, rotary positions, attention and SwiGLU feed-forward.

    x -> norm -> attention -> + -> norm -> feed-forward -> +
    |_________________________|  |_________________________|

This code has no notion of ranks. A block has the heads and intermediate columns of its ``ModelShard``
(``model/parameter_layout.py`` lists the rows of fused matrices). With tensor parallelism, the outputs of its
attention and feed-forward are partial sums; ``hlat.parallel`` reduces them over the ranks.

Tensor suffixes: B batch, S sequence, D model width, G kv groups (= kv heads), R query heads per group, H = G R query
heads, E head width, F = E / 2, T key positions, N blocks of gate and up rows, I rows of gate (or of up) per block.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from hlat.config import ModelConfig
from hlat.model.document_attention import DocumentMask
from hlat.model.kernels.altered_softmax import AlteredSoftmax, attend_altered_by_mask
from hlat.model.kernels.attention import attend
from hlat.model.kernels.matmul import Linear
from hlat.model.kv_cache import LayerCache
from hlat.model.pointwise import SILU, Activation, gated, gated_fused, rms_norm, rms_norm_of_shard, rotate
from hlat.model.rope import RopeTables
from hlat.model.spec import FULL_MODEL, ModelShard, gate_up_groups, intermediate_columns, shard_heads


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, with a weight."""

    offset: ClassVar[float] = 0.0  # of the weight

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)


class ShardedRMSNorm(nn.Module):
    """Root-mean-square norm over all heads, of which a shard has some; its sums are attached from outside.

    ``complete_width`` is that of the complete model; ``copies`` shards have the same elements.
    """

    def __init__(self, width: int, complete_width: int, copies: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        # None if this shard is complete
        self.sum_over_shards: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._complete_width, self._copies = complete_width, copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise (B, S, ...) over all dimensions from the third, in their order."""
        flat = x.flatten(2).contiguous()  # as a view it would keep the complete fused projection alive until backward
        if self.sum_over_shards is None:
            return rms_norm(flat, self.weight, self.eps).view(x.shape)
        return rms_norm_of_shard(flat, self.weight, self.eps, self._mean).view(x.shape)

    def _mean(self, sums: torch.Tensor) -> torch.Tensor:
        assert self.sum_over_shards is not None, "called for shards only"
        # The sum counts an element once for each rank that has a copy of it.
        return self.sum_over_shards(sums).div_(self._complete_width * self._copies)


# Core attention, causal: queries (B, H, S, E), keys and values (B, G, S, E) -> (B, H, S, E). With a document mask each
# query attends to its own document or window only, and there are no cached positions. With another softmax there is a
# mask or a cache.
AttentionCore = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, LayerCache | None, DocumentMask | None, AlteredSoftmax | None],
    torch.Tensor,
]


class CausalCore:
    """Causal attention of the new positions to themselves and, with a cache, to the positions before them.

    The cache has the sliding window of the layer. Without cached positions, the document mask has it.
    """

    def __call__(
        self,
        q_BHSE: torch.Tensor,
        k_BGSE: torch.Tensor,
        v_BGSE: torch.Tensor,
        cache: LayerCache | None,
        document_mask: DocumentMask | None,
        softmax: AlteredSoftmax | None = None,
    ) -> torch.Tensor:
        if cache is None or cache.is_plain:
            if cache is not None:
                cache.append(k_BGSE, v_BGSE)
            if document_mask is not None:
                return document_mask.attend(q_BHSE, k_BGSE, v_BGSE, softmax)
            assert softmax is None, "the decoder makes a mask then"
            return attend(q_BHSE, k_BGSE, v_BGSE)
        k_BGTE, v_BGTE = (cached.to(q_BHSE.dtype) for cached in cache.append(k_BGSE, v_BGSE))
        mask = cache.mask(q_BHSE.shape[2])
        if softmax is not None:
            return attend_altered_by_mask(q_BHSE, k_BGTE, v_BGTE, mask, softmax)
        return attend(q_BHSE, k_BGTE, v_BGTE, mask)


class Attention(nn.Module):
    """Causal self-attention with rotary positions: MHA, GQA or MQA."""

    norm_class: type[RMSNorm] = RMSNorm  # of queries and keys

    def __init__(self, config: ModelConfig, shard: ModelShard = FULL_MODEL) -> None:
        super().__init__()
        width, head_dim, here = config.hidden_size, config.n_head_dim, shard_heads(config, shard)
        self.heads_per_group, self.head_dim, self.coalesce = here.queries // here.kvs, head_dim, config.coalesce
        if config.coalesce:
            rows = (here.queries + 2 * here.kvs) * head_dim
            self.qkv = Linear(width, rows, bias=config.qkv_bias)
        else:
            self.q = Linear(width, here.queries * head_dim, bias=config.qkv_bias)
            self.k = Linear(width, here.kvs * head_dim, bias=config.qkv_bias)
            self.v = Linear(width, here.kvs * head_dim, bias=config.qkv_bias)
        norm = self.norm_class
        self.q_norm: nn.Module = norm(head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm: nn.Module = norm(head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.core: AttentionCore = CausalCore()
        self.sinks = nn.Parameter(torch.empty(here.queries)) if config.attention_sinks else None
        self._cap = config.attn_logit_softcapping
        self.output = Linear(here.queries * head_dim, width, bias=False)

    def forward(
        self,
        x_BSD: torch.Tensor,
        tables: RopeTables | None,
        cache: LayerCache | None = None,
        document_mask: DocumentMask | None = None,
    ) -> torch.Tensor:
        """(B, S, D) -> (B, S, D). With a cache, the S positions follow the cached ones and are appended to it."""
        out: torch.Tensor = self.output(self.attend(*self.project(x_BSD, tables), cache, document_mask))
        return out

    def project(
        self, x_BSD: torch.Tensor, tables: RopeTables | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project and rotate, if there are tables: (B, S, D) -> queries (B, H, S, E), keys and values (B, G, S, E)."""
        q_BSGRE, k_BSG1E, v_BSG1E = self._project(x_BSD)
        q_BSGRE, k_BSG1E = self.q_norm(q_BSGRE), self.k_norm(k_BSG1E)
        # Copies, if not rotated, as of v: a view would keep the complete fused projection alive until backward.
        if tables is None:
            q_BSGRE, k_BSG1E = q_BSGRE.contiguous(), k_BSG1E.contiguous()
        else:
            cos_S11F, sin_S11F = (table[..., None, None, :] for table in tables)
            q_BSGRE, k_BSG1E = rotate(q_BSGRE, cos_S11F, sin_S11F), rotate(k_BSG1E, cos_S11F, sin_S11F)
        v_BSGE = v_BSG1E.squeeze(3).contiguous()
        return q_BSGRE.flatten(2, 3).transpose(1, 2), k_BSG1E.squeeze(3).transpose(1, 2), v_BSGE.transpose(1, 2)

    def attend(
        self,
        q_BHSE: torch.Tensor,
        k_BGSE: torch.Tensor,
        v_BGSE: torch.Tensor,
        cache: LayerCache | None = None,
        document_mask: DocumentMask | None = None,
    ) -> torch.Tensor:
        """Core attention, heads concatenated: (B, H, S, E), (B, G, S, E), (B, G, S, E) -> (B, S, H E)."""
        softmax = None if self.sinks is None and self._cap is None else AlteredSoftmax(self.sinks, self._cap)
        return self.core(q_BHSE, k_BGSE, v_BGSE, cache, document_mask, softmax).transpose(1, 2).flatten(2)

    def _project(self, x_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        per_group, width = self.heads_per_group, self.head_dim
        if self.coalesce:
            fused = self.qkv(x_BSD).unflatten(-1, (-1, per_group + 2, width))
            q, k, v = fused.split((per_group, 1, 1), dim=-2)
            return q, k, v
        q = self.q(x_BSD).unflatten(-1, (-1, per_group, width))
        k = self.k(x_BSD).unflatten(-1, (-1, 1, width))
        return q, k, self.v(x_BSD).unflatten(-1, (-1, 1, width))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); or with another activation, and with biases of gate and up."""

    activation: ClassVar[Activation] = SILU
    bias: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, shard: ModelShard = FULL_MODEL) -> None:
        super().__init__()
        width, inner = config.hidden_size, len(intermediate_columns(config, shard))
        self.coalesce, self.block = config.coalesce, inner // gate_up_groups(config, shard)
        if config.coalesce:
            self.gate_up = Linear(width, 2 * inner, bias=self.bias)
        else:
            self.gate = Linear(width, inner, bias=self.bias)
            self.up = Linear(width, inner, bias=self.bias)
        self.down = Linear(inner, width, bias=False)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.activate(*self.project(x_BSD)))
        return out

    def project(self, x_BSD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Project (B, S, D) to gate and up: one fused tensor (B, S, N, 2, I), or two tensors (B, S, N I)."""
        if self.coalesce:
            return (self.gate_up(x_BSD).unflatten(-1, (-1, 2, self.block)),)
        return self.gate(x_BSD), self.up(x_BSD)

    def activate(self, *gate_up: torch.Tensor) -> torch.Tensor:
        """Compute silu(gate) * up from the result of ``project``: -> (B, S, N I)."""
        if self.coalesce:
            return gated_fused(*gate_up, activation=self.activation).flatten(2)
        return gated(*gate_up, activation=self.activation)


class DecoderBlock(nn.Module):
    """One decoder block, with a norm before attention and one before the feed-forward layer.

    Architectures with norms in other places override the four methods around attention and feed-forward. The forward
    pass and activation checkpointing (``RecomputingForward``) both consist of these methods, attention and
    feed-forward.
    """

    attention_class: type[Attention] = Attention
    feed_forward_class: type[FeedForward] = FeedForward
    norm_class: type[RMSNorm] = RMSNorm  # of the final norm too

    def __init__(self, config: ModelConfig, shard: ModelShard = FULL_MODEL) -> None:
        super().__init__()
        self.attention_norm = self.norm_class(config.hidden_size, config.norm_eps)
        self.attention = self.attention_class(config, shard)
        self.feed_forward_norm = self.norm_class(config.hidden_size, config.norm_eps)
        self.feed_forward = self.feed_forward_class(config, shard)

    def sharded_norms(self) -> list[ShardedRMSNorm]:
        """Norms whose statistics are summed over the shards of the block."""
        return [module for module in self.modules() if isinstance(module, ShardedRMSNorm)]

    def before_attention(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Compute the input of attention from that of the block."""
        out: torch.Tensor = self.attention_norm(x_BSD)
        return out

    def after_attention(self, x_BSD: torch.Tensor, out_BSD: torch.Tensor) -> torch.Tensor:
        """Add the output of attention to the residual stream."""
        return x_BSD + out_BSD

    def before_feed_forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Compute the input of the feed-forward layer from the residual stream."""
        out: torch.Tensor = self.feed_forward_norm(x_BSD)
        return out

    def after_feed_forward(self, x_BSD: torch.Tensor, out_BSD: torch.Tensor) -> torch.Tensor:
        """Add the output of the feed-forward layer to the residual stream."""
        return x_BSD + out_BSD

    def forward(
        self,
        x_BSD: torch.Tensor,
        tables: RopeTables | None,
        cache: LayerCache | None = None,
        document_mask: DocumentMask | None = None,
    ) -> torch.Tensor:
        # In one expression, so that no variable keeps the output of attention alive during the feed-forward layer.
        x_BSD = self.after_attention(x_BSD, self.attention(self.before_attention(x_BSD), tables, cache, document_mask))
        return self.after_feed_forward(x_BSD, self.feed_forward(self.before_feed_forward(x_BSD)))
