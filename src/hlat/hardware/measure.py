"""The peak of a chip that no catalog knows, measured: a short burst of square matrix products on the device.

    sizes 512, 1024, ... while they fit the budget -> the fastest again until the budget is spent -> 2 n^3 / seconds

The best of many, because whatever else runs on the machine can only slow a product down.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hlat.runtime.backend import synchronize

_SIZES = (512, 1024, 2048, 4096, 8192)
_REPEATS = 3  # per size; the first of a size pays for kernel selection and thread start-up, and is never the best


@dataclass(frozen=True)
class MatmulRate:
    """The best of a burst."""

    flops: float  # FLOP/s, a multiply-add counted as two
    size: int  # n of the n x n matrices that reached it


class _Product:
    """One square product, to be timed again and again."""

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype, clock: Callable[[], float]) -> None:
        # Drawn from no generator: a run that is resumed must find the generators as it left them.
        values = torch.arange(size * size, dtype=torch.float32, device=device).sin()
        self.size = size
        self.seconds = float("inf")  # of the fastest so far
        self._left = values.view(size, size).to(dtype)
        self._right = self._left.t().contiguous()
        self._out = torch.empty_like(self._left)
        self._device, self._clock = device, clock

    def run(self) -> None:
        """Multiply once more."""
        synchronize(self._device)
        begin = self._clock()
        torch.mm(self._left, self._right, out=self._out)
        synchronize(self._device)
        # A clock too coarse to see the product must not divide by zero.
        self.seconds = min(self.seconds, max(self._clock() - begin, 1e-9))

    @property
    def flops(self) -> float:
        return 2.0 * self.size**3 / self.seconds


def measure_matmul(
    device: torch.device,
    dtype: torch.dtype,
    *,
    budget_seconds: float = 0.3,
    clock: Callable[[], float] = time.perf_counter,
) -> MatmulRate:
    """Highest rate of ``torch.mm`` on this device, in this dtype, with the threads torch uses now.

    A size is tried if, judging by the one before, it fits into what is left of the budget; the smallest always is.
    """
    deadline = clock() + budget_seconds
    best = previous = None
    for size in _SIZES:
        if previous is not None:
            expected = _REPEATS * previous.seconds * (size / previous.size) ** 3
            if clock() + expected > deadline:
                break
        previous = _Product(size, device, dtype, clock)
        for _ in range(_REPEATS):
            previous.run()
        if best is None or previous.flops > best.flops:
            best = previous
    assert best is not None, "the smallest size is always measured"
    while clock() < deadline:
        best.run()
    return MatmulRate(best.flops, best.size)
