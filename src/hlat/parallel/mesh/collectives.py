"""Collectives: all-gather and reduce-scatter under one name in all torch versions, and a bucketed all-reduce."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

BUCKET_BYTES = 64 << 20
"""Largest size of a bucket of tensors that are sent together; a larger tensor is sent alone."""

# called all_gather_into_tensor and reduce_scatter_tensor up to torch 2.12
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All-gather (...) of every rank into (ranks, ...) on every rank."""
    x = x.contiguous()
    out_R = x.new_empty((group.size(), *x.shape))
    _all_gather(out_R.view(-1), x.view(-1), group=group)
    return out_R


def reduce_scatter(terms_R: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Sum (ranks, ...) over all ranks, and return entry i of the sum, (...), on rank i."""
    terms_R = terms_R.contiguous()
    out = torch.empty_like(terms_R[0])
    _reduce_scatter(out.view(-1), terms_R.view(-1), group=group)
    return out


def all_reduce_together(tensors: Sequence[torch.Tensor], group: ProcessGroup) -> None:
    """Sum each tensor over a group, in place; tensors are sent in buckets."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(flat, group=group)
        sums = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(
            bucket, [flat_sum.view(tensor.shape) for flat_sum, tensor in zip(sums, bucket, strict=True)]
        )


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Split a list of tensors into buckets of about ``BUCKET_BYTES`` and a single dtype."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
