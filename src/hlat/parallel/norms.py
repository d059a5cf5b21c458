"""Norms over all parameters, and clipping by them.

    tensors of any sizes -> norms of short runs, fp32 -> their squares, added up in float64 -> a scalar

A sum of n squares that are added one after another in fp32 is off by up to n 2^-24 of itself, always downwards once the
sum has outgrown its terms. torch's norm on a CPU adds that way over a whole tensor: 1e-4 too low for 4 million
elements, 1.6e-2 for 131 million, and another number for every way of cutting them. Here no fp32 sum is longer than
``_RUN``.
"""

from collections.abc import Iterator, Sequence

import torch

from hlat.runtime.distributed import in_fake_world

_RUN = 256  # elements that are added up in fp32
_SMALL = 1 << 12  # elements of a tensor below which the call costs more than copying it beside others
_TOGETHER = 1 << 15  # elements to copy or to widen at a time: they stay in the cache, and are no peak of memory


def sum_of_squares(tensors: Sequence[torch.Tensor], zero: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of all elements: a scalar. Waits for no device.

    On a CPU its relative error is below (``_RUN`` + 4) 2^-24, 1.6e-5, in whatever order torch adds within a run, for
    tensors of any size, cut in any way. CUDA's kernel adds at most 128 squares in a thread, and its threads in a tree.

    Args:
        tensors: any number, none too.
        zero: a scalar 0 of the dtype and device of the result, which is never this tensor itself: callers add to it.
    """
    if not tensors:
        return zero.clone()
    if zero.device.type != "cpu" or in_fake_world():
        return torch.stack(torch._foreach_norm(list(tensors), 2.0, dtype=zero.dtype)).square().sum()
    norms = [norm for flat in _flat(tensors, zero.dtype) for norm in _norms_of_runs(flat.to(zero.dtype))]
    return torch.cat(norms).double().square().sum().to(zero.dtype) if norms else zero.clone()


def clip(gradients: Sequence[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    """Scale the gradients in place by min(1, limit / norm), as ``torch.nn.utils.clip_grads_with_norm_`` does."""
    if gradients:
        torch._foreach_mul_(list(gradients), (limit / (norm + 1e-6)).clamp(max=1.0))


def _norms_of_runs(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    whole = flat.numel() // _RUN * _RUN
    if whole:
        yield torch.linalg.vector_norm(flat[:whole].view(-1, _RUN), dim=1)
    if whole < flat.numel():
        yield torch.linalg.vector_norm(flat[whole:]).reshape(1)


def _flat(tensors: Sequence[torch.Tensor], wide: torch.dtype) -> Iterator[torch.Tensor]:
    """All elements in one dimension: many small tensors in one, and of what has to be widened a little at a time."""
    waiting: list[torch.Tensor] = []
    count = 0
    for tensor in tensors:
        flat = tensor.reshape(-1)
        if flat.numel() > _SMALL:
            yield from (flat,) if flat.dtype == wide else flat.split(_TOGETHER)
            continue
        waiting.append(flat)
        count += flat.numel()
        if count >= _TOGETHER:
            yield torch.cat(waiting)
            waiting, count = [], 0
    if waiting:
        yield torch.cat(waiting)
