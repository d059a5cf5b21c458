"""Global L2 norm of many tensors.

    tensors of any size -> norms of short runs of elements, fp32 -> squares, summed in float64 -> a scalar
    bf16 tensors on a CPU -> sums of squares of short runs, float64 -----^

A sequential fp32 sum of n squares has a relative error of up to n 2^-24, and is always too low once the sum is much
larger than its terms. torch's norm on a CPU sums a complete tensor that way: 1e-4 too low for 4 million elements,
1.6e-2 for 131 million, and the result depends on how the tensors are sharded. Here no fp32 sum has more than ``_RUN``
terms.
"""

from collections.abc import Iterator, Sequence

import torch

from hlat.optim import square_sums
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.fake_world import in_fake_world

_RUN = 256  # elements summed in fp32
_SMALL = 1 << 12  # elements; smaller tensors are concatenated, since a call each would cost more
_CHUNK = 1 << 15  # elements to copy at a time: they fit into the cache and add no memory peak
_SUMMED = 1 << 14  # float64 numbers summed at a time: torch starts no threads for so few


def sum_of_squares(tensors: Sequence[torch.Tensor], zero: torch.Tensor) -> torch.Tensor:
    """Sum the squares of all elements: a scalar. Does not synchronise with the device.

    On a CPU its relative error is below (``_RUN`` + 4) 2^-24 = 1.6e-5, for any order of summation within a run and
    tensors of any size and sharding; of bf16 tensors it is the rounding of the result. The number of threads changes
    no bit. CUDA's kernel sums at most 128 squares per thread, and the threads in a tree.

    Args:
        tensors: any number of tensors, also none.
        zero: a scalar 0 with the dtype and device of the result. The result is always a new tensor.
    """
    if not tensors:
        return zero.clone()
    if not backend_of(zero.device).sums_norms_in_order or in_fake_world():
        return torch.stack(torch._foreach_norm(list(tensors), 2.0, dtype=zero.dtype)).square().sum()
    narrow = [tensor for tensor in tensors if tensor.dtype == torch.bfloat16]
    others = [tensor for tensor in tensors if tensor.dtype != torch.bfloat16]
    norms = [norm for flat in _flat(others) for norm in _norms_of_runs(flat.to(zero.dtype))]
    totals = [_sum(square_sums(list(_flat(narrow))))] if narrow else []  # its library is not compiled for nothing
    if norms:
        totals.append(_sum(torch.cat(norms).double().square()))
    return torch.stack(totals).sum().to(zero.dtype) if totals else zero.clone()


def _norms_of_runs(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    multiple = flat.numel() // _RUN * _RUN
    if multiple:
        yield torch.linalg.vector_norm(flat[:multiple].view(-1, _RUN), dim=1)
    if multiple < flat.numel():
        yield torch.linalg.vector_norm(flat[multiple:]).reshape(1)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Sum float64 numbers, some at a time: torch divides a longer sum over its threads, which changes the order."""
    while values.numel() > _SUMMED:
        values = torch.stack([part.sum() for part in values.split(_SUMMED)])
    return values.sum()


def _flat(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Flatten tensors; concatenate small ones."""
    pending: list[torch.Tensor] = []
    count = 0
    for tensor in tensors:
        flat = tensor.reshape(-1)
        if flat.numel() > _SMALL:
            yield flat
            continue
        pending.append(flat)
        count += flat.numel()
        if count >= _CHUNK:
            yield torch.cat(pending)
            pending, count = [], 0
    if pending:
        yield torch.cat(pending)
