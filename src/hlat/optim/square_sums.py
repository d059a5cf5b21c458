"""Sums of squares of bf16 tensors on a CPU, in float64: the same bits compiled or not, on any number of threads.

    a tensor, bf16 -> squares, exact in float64 -> sums of ``RUN`` consecutive elements, added in a defined order

``native.c`` reads bf16 once; torch's norm has to be given an fp32 copy. The order of additions in a run: element
16 i + j is added to sum j, for i = 0 to 15; then the second half of the sums is added to the first until one is left.
Elements past the end count as zeros.
"""

from collections.abc import Sequence

import torch

from hlat.optim.adamw_cpu import native_square_sums

RUN = 256
"""Elements of a sum."""
_LANES = 16
_CHUNK = 1 << 15  # elements at a time: temporaries fit into the cache


def square_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the squares of each run of ``RUN`` elements of each tensor: float64 on the CPU, one number for each run.

    Args:
        tensors: bf16, on the CPU.
    """
    flat = [tensor.reshape(-1).contiguous() for tensor in tensors if tensor.numel()]  # a view may remain strided
    sums = native_square_sums(flat, RUN)
    return plain_square_sums(flat) if sums is None else sums


def plain_square_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the same in plain torch: the definition that the compiled function reproduces bit for bit."""
    sums = [_sum_runs(chunk) for tensor in tensors for chunk in tensor.split(_CHUNK)]
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.float64)


def _sum_runs(values: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(values, (0, -values.numel() % RUN)).double()
    total, *others = padded.square().view(-1, RUN // _LANES, _LANES).unbind(1)
    for other in others:
        total = total + other
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total.squeeze(1)
