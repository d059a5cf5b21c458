"""Measured peak of a chip that the catalog does not have: a short burst of square matrix products.

    sizes 512, 1024, ... while they fit the budget -> the fastest again until the budget is spent -> 2 n^3 / seconds

The result is the best of many repetitions, since other processes can only slow a product down.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hlat.runtime.backend import synchronize

_SIZES = (512, 1024, 2048, 4096, 8192)
_REPEATS = 3  # per size; the first includes kernel selection and thread start-up, and is never the fastest


@dataclass(frozen=True)
class MatmulRate:
    """Best rate of a burst.

    Attributes:
        flops: FLOP/s; a multiply-add counts as two.
        size: n of the (n, n) matrices that reached it.
    """

    flops: float
    size: int


class _Product:
    """One square product, timed repeatedly; ``seconds`` is its fastest time so far."""

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype, clock: Callable[[], float]) -> None:
        # Without random numbers: a resumed run must find the generators in their saved state.
        values = torch.arange(size * size, dtype=torch.float32, device=device).sin()
        self.size = size
        self.seconds = float("inf")
        self._left = values.view(size, size).to(dtype)
        self._right = self._left.t().contiguous()
        self._out = torch.empty_like(self._left)
        self._device, self._clock = device, clock

    def run(self) -> None:
        """Multiply once and keep the fastest time."""
        synchronize(self._device)
        begin = self._clock()
        torch.mm(self._left, self._right, out=self._out)
        synchronize(self._device)
        # A coarse clock may measure 0 seconds, which must not divide by zero.
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
    """Measure the highest rate of ``torch.mm`` on this device, with the current number of threads.

    A size is measured if its time, extrapolated from the previous size, fits into the remaining budget; the smallest
    always is.

    Args:
        device: the device.
        dtype: dtype of the matrices.
        budget_seconds: duration of the measurement.
        clock: monotonic clock in seconds.
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
