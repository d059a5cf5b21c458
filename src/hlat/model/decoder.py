"""The decoder.

    tokens -> embedding -> blocks -> norm -> head -> logits, or with labels the loss

Tensor suffixes: B batch, S sequence, D model width, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import nn

from hlat.config.sections import ModelConfig
from hlat.model.document_mask import DocumentMask
from hlat.model.kv_cache import KVCache
from hlat.model.layers import DecoderBlock, RMSNorm
from hlat.model.loss import Head, TiedHead
from hlat.model.matmul import Embedding
from hlat.model.model_shard import FULL_MODEL, ModelShard, vocabulary_rows
from hlat.model.rope import Rope


class Decoder(nn.Module):
    """A LLaMA-family language model, or the part of one that a process holds.

    Attributes:
        config: what it was built from.
        part: which part of that model this is.
        embedding, layers ("0", "1", ...), norm, head: its parts, in the order of the data; embedding, norm and head
            are None where they are not in this part.
        spans: the positions of the tokens of a sequence that come here, as (start, stop) pairs; None for all of them,
            as many as there are.
        compute: the dtype of the activations, hence of the products; None for that of the weights. Norm statistics,
            rotations, softmax and loss are fp32 or wider whatever it is.
    """

    def __init__(self, config: ModelConfig, shard: ModelShard = FULL_MODEL) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        rows = len(vocabulary_rows(config, shard))
        self.embedding = Embedding(rows, config.hidden_size) if shard.embedding else None
        self.layers = nn.ModuleDict({str(index): DecoderBlock(config, shard) for index in shard.layer_range(config)})
        self.norm = RMSNorm(config.hidden_size, config.norm_eps) if shard.head else None
        self.head = self._build_head(rows) if shard.head else None
        self.rope = Rope(config)
        self.spans: tuple[tuple[int, int], ...] | None = None
        self.compute: torch.dtype | None = None

    def _build_head(self, rows: int) -> Head:
        if self.config.tie_embeddings and self.embedding is not None:
            return TiedHead(self.embedding)
        return Head(rows, self.config.hidden_size)

    def blocks(self) -> Iterator[DecoderBlock]:
        """Its decoder blocks, in order."""
        for block in self.layers.values():
            assert isinstance(block, DecoderBlock), "nothing else is put there"
            yield block

    def hidden(
        self, x: torch.Tensor, *, positions: torch.Tensor | None = None, cache: KVCache | None = None
    ) -> torch.Tensor:
        """From what enters to what the head takes, or to what leaves the last block where there is no head.

        Args:
            x: token ids (B, S), int64; or, where there is no embedding, what left the block before, (B, S, D).
            positions: place of each token in its document, int64, of the tokens that come here: (B, S), also where x is
                a shard of them. Every 0 begins a document that sees only itself, and so does every row.
            cache: the tokens follow those it has seen, and are stored in it; not together with positions.

        Returns:
            (B, S, D), normed where there is a head.

        Raises:
            ValueError: the cache has no room for so many tokens.
        """
        assert positions is None or cache is None, "generation is of one document"
        spans = self._spans(x, cache)
        tables = self.rope.tables(spans, x.device, positions)
        document_mask = DocumentMask.from_positions(positions, spans) if positions is not None else None
        x_BSD = self.embedding(x) if self.embedding is not None else x
        if self.compute is not None:
            x_BSD = x_BSD.to(self.compute)
        for name, block in self.layers.items():
            x_BSD = block(x_BSD, tables, cache.layer(int(name)) if cache is not None else None, document_mask)
        if cache is not None:
            cache.advance(x.shape[1])
        return self.norm(x_BSD) if self.norm is not None else x_BSD

    def _spans(self, x: torch.Tensor, cache: KVCache | None) -> tuple[tuple[int, int], ...]:
        if self.spans is not None:
            return self.spans
        start, count = 0, x.shape[1]
        if cache is not None:
            cache.check_room(count)
            start = cache.length
        return ((start, start + count),)

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """What enters, as for ``hidden``, to logits (B, S, V) in the dtype of the activations.

        Without a head: to what the next part takes, (B, S, D), whether there are labels or not.

        Args:
            x: as for ``hidden``.
            labels: (B, S), int64: return their summed cross-entropy instead of logits, a scalar; see ``head_loss``.
            positions, cache: as for ``hidden``.

        Raises:
            ValueError: the cache has no room for so many tokens.
        """
        hidden_BSD = self.hidden(x, positions=positions, cache=cache)
        out: torch.Tensor = self.head(hidden_BSD, labels) if self.head is not None else hidden_BSD
        return out
