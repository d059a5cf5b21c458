"""Tensor, sequence and vocabulary parallelism: blocks, embedding, head and loss sharded over the tensor group.

    blocks, without sequence parallelism:  x -(copy)-> shard of attention or feed-forward -(all-reduce)-> +
    with:  x, a shard of the sequence -(all-gather)-> shard of attention or feed-forward -(reduce-scatter)-> +

    token ids -> lookup in the local rows, zeros for other ids -> sum over ranks
    hidden -> logits of the local rows -> cross-entropy from reduced maxima and sums; no rank has all logits

A rank has some of the heads and intermediate columns of every block (``ModelShard``), so the output of its output
projection is one term of a sum over ranks (Shoeybi et al. 2019, Megatron-LM, section 3). With sequence parallelism the
norms, the residual stream and their saved activations are sharded as well, and the all-reduce is replaced by an
all-gather and a reduce-scatter, which send the same number of bytes (Korthikanti et al. 2022, section 4.2.2).

The collectives are attached to the model's modules as hooks; all tensors are plain local tensors. The autograd
functions are pairs, each the backward pass of the other: gather / reduce-scatter, copy / all-reduce. A norm over all
heads sums its statistics over the ranks, forward and backward.

Tensor suffix: N tokens of a chunk.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from hlat.model import CrossEntropy, Decoder, DecoderBlock, vocabulary_rows
from hlat.parallel.process_groups import all_gather, differentiable, reduce_scatter


def all_gather_sequence(x_BsX: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All-gather the shards (B, S / ranks, ...) of a sequence into (B, S, ...) on every rank."""
    return all_gather(x_BsX, group).transpose(0, 1).flatten(1, 2)


def reduce_scatter_sequence(x_BSX: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Sum terms (B, S, ...) over the ranks, and return this rank's shard (B, S / ranks, ...) of the sum."""
    return reduce_scatter(x_BSX.unflatten(1, (group.size(), -1)).transpose(0, 1), group)


def _all_reduce(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


_gather_sequence = differentiable("GatherSequence", all_gather_sequence, reduce_scatter_sequence)
_reduce_scatter_sequence = differentiable("ReduceScatterSequence", reduce_scatter_sequence, all_gather_sequence)
_copy = differentiable("Copy", lambda x, group: x.view_as(x), _all_reduce)
_sum = differentiable("AllReduce", _all_reduce, lambda grad, group: grad)


def gather_or_copy(x: torch.Tensor, group: ProcessGroup, sequence: bool) -> torch.Tensor:
    """Prepare the input of a column-parallel layer: (B, S, D) from shards (B, S / ranks, D), or the same input."""
    return (_gather_sequence if sequence else _copy)(x, group)


def reduce(x: torch.Tensor, group: ProcessGroup, sequence: bool) -> torch.Tensor:
    """Sum the output (B, S, D) of a row-parallel layer over ranks; shard the sum like ``gather_or_copy``'s input."""
    return (_reduce_scatter_sequence if sequence else _sum)(x, group)


def register_input_gather(module: nn.Module, group: ProcessGroup, sequence: bool) -> None:
    """Register a hook that gathers (or copies) the first argument of a module."""
    module.register_forward_pre_hook(lambda _, args: (gather_or_copy(args[0], group, sequence), *args[1:]))


def register_output_reduction(module: nn.Module, group: ProcessGroup, sequence: bool) -> None:
    """Register a hook that sums the output of a module over the ranks."""
    module.register_forward_hook(lambda _module, _args, out: reduce(out, group, sequence))


def parallelize_block(block: DecoderBlock, group: ProcessGroup, sequence: bool) -> None:
    """Attach collectives to a tensor-parallel shard of a block, so that it computes the complete block's output."""
    for layer, last in (
        (block.attention, block.attention.output),
        (block.feed_forward, block.feed_forward.down),
    ):
        register_input_gather(layer, group, sequence)
        register_output_reduction(last, group, sequence)
    for norm in block.sharded_norms():
        norm.sum_over_shards = partial(_all_reduce, group=group)


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


def parallelize(model: Decoder, group: ProcessGroup, sequence: bool) -> None:
    """Attach collectives to the blocks, the embedding and the head of a shard, whichever it has."""
    for block in model.blocks():
        parallelize_block(block, group, sequence)
    parallelize_embedding_and_head(model, group, sequence)


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
        # All ranks need chunks of as many tokens, or their collectives would not match.
        most_rows = -(-model.config.vocab_size // group.size())
        model.head.cross_entropy = ParallelCrossEntropy(rows, most_rows, group)
        model.head.cross_entropy.softcap = model.config.final_logit_softcapping


class ParallelCrossEntropy(CrossEntropy):
    """Cross-entropy of logits sharded by vocabulary: two all-reduces, of one and of two numbers per token."""

    def __init__(self, rows: range, most_rows: int, group: ProcessGroup) -> None:
        super().__init__(rows.start, most_rows)
        self._group = group

    def reduce_max(self, peak_N: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(peak_N, op=dist.ReduceOp.MAX, group=self._group)
        return peak_N

    def reduce_sum(self, sums_2N: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(sums_2N, group=self._group)
        return sums_2N

    def reduce_min(self, rows_N: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(rows_N, op=dist.ReduceOp.MIN, group=self._group)
        return rows_N
