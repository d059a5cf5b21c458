"""The decoder, and how one is built.

    tokens -> embedding -> blocks -> norm -> head -> logits

Tensor suffixes: B batch, S sequence, D model width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn

from hlat.config import ModelConfig
from hlat.model.cache import KVCache
from hlat.model.initial import initialise
from hlat.model.layers import Block, RMSNorm
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
    """A LLaMA-family language model.

    Attributes:
        config: what it was built from.
        embedding, layers ("0", "1", ...), norm, head: its parts, in the order of the data.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(index): Block(config) for index in range(config.layers)})
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head: nn.Module = (
            TiedHead(self.embedding)
            if config.tie_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.rope = Rope(config)

    def hidden(self, tokens_BS: torch.Tensor, *, cache: KVCache | None = None) -> torch.Tensor:
        """Token ids (B, S), int64 -> the normed output of the last block (B, S, D), which ``head`` takes.

        With a cache, the tokens follow those it has seen, and are stored in it.

        Raises:
            ValueError: the cache has no room for so many tokens.
        """
        start, count = 0, tokens_BS.shape[1]
        if cache is not None:
            cache.check_room(count)
            start = cache.length
        tables = self.rope.tables(start, start + count, tokens_BS.device)
        x_BSD = self.embedding(tokens_BS)
        for name, block in self.layers.items():
            x_BSD = block(x_BSD, tables, cache.layer(int(name)) if cache is not None else None)
        if cache is not None:
            cache.advance(count)
        normed_BSD: torch.Tensor = self.norm(x_BSD)
        return normed_BSD

    def forward(self, tokens_BS: torch.Tensor, *, cache: KVCache | None = None) -> torch.Tensor:
        """Token ids (B, S), int64 -> logits (B, S, V) in the dtype of the head's product.

        Raises:
            ValueError: the cache has no room for so many tokens.
        """
        logits_BSV: torch.Tensor = self.head(self.hidden(tokens_BS, cache=cache))
        return logits_BSV


def build(
    config: ModelConfig, *, device: torch.device | str, seed: int | None, dtype: torch.dtype = torch.float32
) -> Decoder:
    """A decoder on ``device``, made on the meta device first so that no weight exists twice.

    Args:
        config: the model.
        device: where its weights go; "meta" for none at all.
        seed: of the initial weights; None leaves them uninitialised, to be loaded.
        dtype: of the weights.
    """
    with torch.device("meta"):
        model = Decoder(config).to(dtype)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    if seed is not None:
        initialise(model, config, seed)
    return model
