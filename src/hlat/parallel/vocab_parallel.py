"""Vocabulary parallelism: embedding, head and loss with the vocabulary sharded over the tensor group.

    token ids -> lookup in the local rows, zeros for other ids -> sum over ranks
    hidden -> logits of the local rows -> cross-entropy from reduced maxima and sums; no rank has all logits

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
    """Hooks of an embedding shard: look up ids of local rows only, and sum over the ranks."""

    def __init__(self, rows: range, group: ProcessGroup, sequence: bool) -> None:
        self._rows, self._group, self._sequence = rows, group, sequence
        self._is_remote: torch.Tensor | None = None

    def mask_ids(self, _: nn.Module, args: tuple[Any, ...]) -> torch.Tensor:
        ids = args[0]
        self._is_remote = (ids < self._rows.start) | (ids >= self._rows.stop)
        shifted: torch.Tensor = (ids - self._rows.start).masked_fill(self._is_remote, 0)
        return shifted

    def reduce_output(self, _: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        assert self._is_remote is not None, "mask_ids() ran before"
        local = out.masked_fill(self._is_remote.unsqueeze(-1), 0)
        self._is_remote = None
        return reduce(local, self._group, self._sequence)


def parallelize_embedding_and_head(model: Decoder, group: ProcessGroup, sequence: bool) -> None:
    """Attach collectives to embedding and head (if in this shard), so that they compute the unsharded result.

    Only the head's logits stay restricted to the local rows; its loss is that of the complete vocabulary.
    """
    rows = vocabulary_rows(model.config, model.shard)
    if model.embedding is not None:
        hooks = _EmbeddingHooks(rows, group, sequence)
        model.embedding.register_forward_pre_hook(hooks.mask_ids)
        model.embedding.register_forward_hook(hooks.reduce_output)
    if model.head is not None:
        register_input_gather(model.head, group, sequence)
        most_rows = -(-model.config.vocab_size // group.size())
        model.head.cross_entropy = ParallelCrossEntropy(rows, most_rows, group)


class ParallelCrossEntropy(CrossEntropy):
    """Cross-entropy of logits sharded by vocabulary: two all-reduces, of one and of two numbers per token.

    Args:
        rows: vocabulary rows of the local logits.
        most_rows: largest number of rows of any rank.
        group: the tensor group.
    """

    def __init__(self, rows: range, most_rows: int, group: ProcessGroup) -> None:
        super().__init__(rows.start, most_rows)
        self._group = group

    def reduce_max(self, peak_N: torch.Tensor) -> torch.Tensor:
        """Take the maximum over the ranks, in place."""
        dist.all_reduce(peak_N, op=dist.ReduceOp.MAX, group=self._group)
        return peak_N

    def reduce_sum(self, sums_2N: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        dist.all_reduce(sums_2N, group=self._group)
        return sums_2N

    def reduce_min(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Take the minimum over the ranks, in place."""
        dist.all_reduce(rows_N, op=dist.ReduceOp.MIN, group=self._group)
        return rows_N
