"""The vocabulary cut over the tensor group: embedding, head and loss.

    token ids -> rows that are here, zeros for the others -> sum over ranks
    hidden -> logits of the rows that are here -> cross-entropy from their maxima and sums; no rank has all logits

Tensor suffix: N tokens of a chunk.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from hlat.model import CrossEntropy, Decoder, vocabulary_rows
from hlat.parallel.tensor_parallel import reduce, register_input_gather


class _EmbeddingHooks:
    """Looks up only the ids whose rows are here."""

    def __init__(self, rows: range, group: ProcessGroup, sequence: bool) -> None:
        self._rows, self._group, self._sequence = rows, group, sequence
        self._absent: torch.Tensor | None = None

    def before(self, _: nn.Module, args: tuple[Any, ...]) -> torch.Tensor:
        ids = args[0]
        self._absent = (ids < self._rows.start) | (ids >= self._rows.stop)
        shifted: torch.Tensor = (ids - self._rows.start).masked_fill(self._absent, 0)
        return shifted

    def after(self, _: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        assert self._absent is not None, "before() ran"
        here = out.masked_fill(self._absent.unsqueeze(-1), 0)
        self._absent = None
        return reduce(here, self._group, self._sequence)


def parallelize_embedding_and_head(model: Decoder, group: ProcessGroup, sequence: bool) -> None:
    """Make embedding and head, as far as they are in this part, take and give what the whole ones would.

    The head's logits stay those of the rows that are here; its loss is that of the whole vocabulary.
    """
    rows = vocabulary_rows(model.config, model.shard)
    if model.embedding is not None:
        hooks = _EmbeddingHooks(rows, group, sequence)
        model.embedding.register_forward_pre_hook(hooks.before)
        model.embedding.register_forward_hook(hooks.after)
    if model.head is not None:
        register_input_gather(model.head, group, sequence)
        most = -(-model.config.vocab_size // group.size())
        model.head.cross_entropy = ParallelCrossEntropy(rows, most, group)


class ParallelCrossEntropy(CrossEntropy):
    """Cross-entropy of logits whose vocabulary is cut over a group: two all-reduces of one and two numbers per token.

    Args:
        rows: the vocabulary rows whose logits are here.
        most: the most rows that a rank has.
        group: the tensor group.
    """

    def __init__(self, rows: range, most: int, group: ProcessGroup) -> None:
        super().__init__(rows.start, most)
        self._group = group

    def reduce_max(self, peak_N: torch.Tensor) -> torch.Tensor:
        """In place."""
        dist.all_reduce(peak_N, op=dist.ReduceOp.MAX, group=self._group)
        return peak_N

    def reduce_sum(self, sums_2N: torch.Tensor) -> torch.Tensor:
        """In place."""
        dist.all_reduce(sums_2N, group=self._group)
        return sums_2N
