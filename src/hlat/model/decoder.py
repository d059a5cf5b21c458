"""The decoder.

    tokens -> embedding -> blocks -> norm -> head -> logits

Tensor suffixes: B batch, S sequence, D model width, V vocabulary.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from hlat.config import ModelConfig
from hlat.model.cache import KVCache
from hlat.model.layers import Block, RMSNorm
from hlat.model.part import WHOLE, ModelPart, vocabulary_rows
from hlat.model.rope import Rope


class TiedHead(nn.Module):
    """The output head that is the embedding matrix. It has no parameter of its own and follows the embedding's."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        # In a tuple, so that the embedding is not registered as a submodule a second time.
        self._embedding = (embedding,)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """(B, S, D) -> logits (B, S, V)."""
        return F.linear(x_BSD, self._embedding[0].weight)


class Decoder(nn.Module):
    """A LLaMA-family language model, or the part of one that a process holds.

    Attributes:
        config: what it was built from.
        part: which part of that model this is.
        embedding, layers ("0", "1", ...), norm, head: its parts, in the order of the data; embedding, norm and head
            are None where they are not in this part.
        spans: the positions of the tokens of a sequence that come here, as (start, stop) pairs; None for all of them,
            as many as there are.
    """

    def __init__(self, config: ModelConfig, part: ModelPart = WHOLE) -> None:
        super().__init__()
        self.config, self.part = config, part
        rows = len(vocabulary_rows(config, part))
        self.embedding = nn.Embedding(rows, config.hidden_size) if part.embedding else None
        self.layers = nn.ModuleDict({str(index): Block(config, part) for index in part.layer_range(config)})
        self.norm = RMSNorm(config.hidden_size, config.norm_eps) if part.head else None
        self.head = self._build_head(rows) if part.head else None
        self.rope = Rope(config)
        self.spans: tuple[tuple[int, int], ...] | None = None

    def _build_head(self, rows: int) -> nn.Module:
        if self.config.tie_embeddings and self.embedding is not None:
            return TiedHead(self.embedding)
        return nn.Linear(self.config.hidden_size, rows, bias=False)

    def blocks(self) -> Iterator[Block]:
        """Its decoder blocks, in order."""
        for block in self.layers.values():
            assert isinstance(block, Block), "nothing else is put there"
            yield block

    def hidden(self, x: torch.Tensor, *, cache: KVCache | None = None) -> torch.Tensor:
        """From what enters to what the head takes, or to what leaves the last block where there is no head.

        Args:
            x: token ids (B, S), int64; or, where there is no embedding, what left the block before, (B, S, D).
            cache: the tokens follow those it has seen, and are stored in it.

        Returns:
            (B, S, D), normed where there is a head.

        Raises:
            ValueError: the cache has no room for so many tokens.
        """
        tables = self.rope.tables(self._spans(x, cache), x.device)
        x_BSD = self.embedding(x) if self.embedding is not None else x
        for name, block in self.layers.items():
            x_BSD = block(x_BSD, tables, cache.layer(int(name)) if cache is not None else None)
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

    def forward(self, x: torch.Tensor, *, cache: KVCache | None = None) -> torch.Tensor:
        """What enters, as for ``hidden``, to logits (B, S, V) in the dtype of the head's product.

        Without a head: to what the next part takes, (B, S, D).

        Raises:
            ValueError: the cache has no room for so many tokens.
        """
        hidden_BSD = self.hidden(x, cache=cache)
        out: torch.Tensor = self.head(hidden_BSD) if self.head is not None else hidden_BSD
        return out
