"""The decoder: a language model, complete or one shard of it.

    tokens -> embedding -> blocks -> norm -> head -> logits, or the loss if labels are given

Tensor suffixes: B batch, S sequence, D model width, V vocabulary.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from hlat.config import ModelConfig
from hlat.model.architectures import build_block
from hlat.model.derived.parameter_layout import parameter_layouts
from hlat.model.document_mask import DocumentMask
from hlat.model.kv_cache import KVCache
from hlat.model.layers import DecoderBlock, RMSNorm
from hlat.model.loss import Head, Reduction, TiedHead, head_loss
from hlat.model.matmul import Embedding
from hlat.model.model_shard import FULL_MODEL, ModelShard, vocabulary_rows
from hlat.model.rope import Rope


class DecodingStep(Protocol):
    """A faster way to compute all blocks and the final norm for one new token of each row."""

    def takes(self, x_BSD: torch.Tensor, cache: KVCache) -> bool:
        """Return True if it computes this call."""
        ...

    def __call__(
        self, x_B1D: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], cache: KVCache, window: int | None
    ) -> torch.Tensor:
        """Compute (B, 1, D) -> (B, 1, D), in the memory of ``x``; keys and values are appended to the cache."""
        ...


class Decoder(nn.Module):
    """A decoder-only language model, or the shard of one that a process builds.

    Attributes:
        config: the complete model.
        shard: the layers, heads and columns of it that this module has.
        embedding, layers ("0", "1", ...), norm, head: the submodules, in order of execution. Embedding, norm and head
            are None if they are not in this shard.
        spans: (start, stop) pairs of the sequence positions that this process computes; None for all positions.
        window: number of tokens that a token attends to, itself included; None for all before it.
        compute: dtype of the activations, and so of the matrix products; None for the dtype of the weights. Norm
            statistics, rotations, softmax and loss are always computed in fp32 or wider.
        step: computes calls with one token of each row and a cache, if it takes them; None for the blocks themselves.
    """

    def __init__(self, config: ModelConfig, shard: ModelShard = FULL_MODEL) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        rows = len(vocabulary_rows(config, shard))
        self.embedding = Embedding(rows, config.hidden_size) if shard.embedding else None
        self.layers = nn.ModuleDict({str(index): build_block(config, shard) for index in shard.layer_range(config)})
        self.norm = RMSNorm(config.hidden_size, config.norm_eps) if shard.head else None
        self.head = self._build_head(rows) if shard.head else None
        self.rope = Rope(config)
        self.spans: tuple[tuple[int, int], ...] | None = None
        self.window = config.sliding_window
        self.compute: torch.dtype | None = None
        self.step: DecodingStep | None = None
        self._check_description()

    def _check_description(self) -> None:
        """Compare the parameters with the description of the architecture, which all other rooms rely on."""
        described = {name: layout.shape for name, layout in parameter_layouts(self.config, self.shard).items()}
        built = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        wrong = sorted(name for name in built.keys() | described.keys() if built.get(name) != described.get(name))
        assert not wrong, f"hlat.model.architectures describes these parameters otherwise: {', '.join(wrong)}"

    def _build_head(self, rows: int) -> Head:
        if self.config.tie_embeddings and self.embedding is not None:
            return TiedHead(self.embedding)
        return Head(rows, self.config.hidden_size)

    def blocks(self) -> Iterator[DecoderBlock]:
        """Iterate over the decoder blocks, in order."""
        for block in self.layers.values():
            assert isinstance(block, DecoderBlock), "layers has decoder blocks only"
            yield block

    def hidden(
        self, x: torch.Tensor, *, positions: torch.Tensor | None = None, cache: KVCache | None = None
    ) -> torch.Tensor:
        """Compute the hidden states: the input of the head, or of the next stage if this shard has no head.

        Args:
            x: token ids (B, S), int64; if this shard has no embedding, the hidden states (B, S, D) of the stage before.
            positions: position of each token within its document, int64 (B, S), for all positions of ``spans``, also if
                x is a shard of the sequence. Every 0 starts a document, and attention stays within documents. Every
                row starts a document. With a cache they only rotate: its mask says what tokens attend to.
            cache: keys and values of earlier tokens; the new ones are appended. Together with ``positions`` only if it
                has a mask for this call (``KVCache.attend_to``), which also has to include the sliding window.

        Returns:
            (B, S, D), normalised by the final norm if this shard has the head.

        Raises:
            ValueError: the cache has no room for the new tokens.
        """
        masked = cache is not None and cache.has_mask
        assert positions is None or cache is None or masked, "generation continues a single document"
        spans = self._spans(x, cache)
        tables = self.rope.tables(spans, x.device, positions)
        document_mask = None if masked else self._document_mask(x, spans, positions)
        x_BSD = self.embedding(x) if self.embedding is not None else x
        if self.compute is not None:
            x_BSD = x_BSD.to(self.compute)
        if cache is not None and self.step is not None and self.step.takes(x_BSD, cache):
            x_BSD = self.step(x_BSD, tables, cache, self.window)
            cache.advance(1)
            return x_BSD
        for name, block in self.layers.items():
            x_BSD = block(x_BSD, tables, cache.layer(int(name)) if cache is not None else None, document_mask)
        if cache is not None:
            cache.advance(x.shape[1])
        return self.norm(x_BSD) if self.norm is not None else x_BSD

    def _document_mask(
        self, x: torch.Tensor, spans: tuple[tuple[int, int], ...], positions: torch.Tensor | None
    ) -> DocumentMask | None:
        """Build the mask of this call; None for causal attention to all earlier positions of complete rows."""
        if positions is not None:
            return DocumentMask.from_positions(positions, spans, self.window)
        start, stop = spans[0][0], spans[-1][1]
        if self.window is None or (len(spans) == 1 and (start > 0 or stop <= self.window)):
            return None  # if start > 0, the cache has the positions before
        return DocumentMask.from_rows(x.shape[0], spans, x.device, self.window)

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
        reduction: Reduction = head_loss,
    ) -> torch.Tensor:
        """Compute logits (B, S, V) in the dtype of the activations, or the loss if labels are given.

        Args:
            x: see ``hidden``.
            labels: token ids (B, S), int64. If given, return their summed cross-entropy, a scalar; see ``head_loss``.
            positions: see ``hidden``.
            cache: see ``hidden``.
            reduction: computes something else from hidden states and labels: ``row_losses``, ``next_tokens``.

        Returns:
            Logits or loss; hidden states (B, S, D) if this shard has no head, with or without labels.

        Raises:
            ValueError: the cache has no room for the new tokens.
        """
        hidden_BSD = self.hidden(x, positions=positions, cache=cache)
        out: torch.Tensor = self.head(hidden_BSD, labels, reduction=reduction) if self.head is not None else hidden_BSD
        return out
