"""Measured peak of a chip that the catalog does not have: a short burst of square matrix products.

    sizes 512, 1024, ... while they fit the budget, by each library that training multiplies with
        -> the fastest again until the budget is spent -> 2 n^3 / seconds

The result is the best of many repetitions, since other processes can only slow a product down. It is the best of the
libraries too: a product of training by any of them then needs a share of the peak, never more.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hlat.runtime.backend.device import PRODUCTS, synchronize
from hlat.runtime.backend.table import backend_of

_SIZES = (512, 1024, 2048, 4096, 8192)
_REPEATS = 3  # per size and library; the first includes kernel selection and thread start-up, and is never the fastest


@dataclass(frozen=True)
class MatmulRate:
    """Best rate of a burst.

    Attributes:
        flops: FLOP/s; a multiply-add counts as two.
        size: n of the (n, n) matrices that reached it.
        library: library that reached it, a key of ``PRODUCTS``.
    """

    flops: float
    size: int
    library: str


class _Product:
    """One square product by one library, timed repeatedly; ``seconds`` is its fastest time so far."""

    def __init__(self, matrix: torch.Tensor, library: str, clock: Callable[[], float]) -> None:
        self.size, self.library = len(matrix), library
        self.seconds = float("inf")
        self._matrix, self._multiply, self._clock = matrix, PRODUCTS[library], clock

    def run(self) -> None:
        """Multiply once and keep the fastest time."""
        synchronize(self._matrix.device)
        begin = self._clock()
        self._multiply(self._matrix, self._matrix)
        synchronize(self._matrix.device)
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
    """Measure the highest rate of matrix products on this device, with the current number of threads.

    A size is measured, by all libraries, if its time, extrapolated from the previous size, fits into the remaining
    budget; the smallest always is.

    Args:
        device: the device.
        dtype: dtype of the matrices, in which the device multiplies (``Backend.product_dtype``).
        budget_seconds: duration of the measurement.
        clock: monotonic clock in seconds.
    """
    deadline = clock() + budget_seconds
    measured: list[_Product] = []
    previous: list[_Product] = []
    for size in _SIZES:
        expected = _REPEATS * sum(product.seconds * (size / product.size) ** 3 for product in previous)
        if previous and clock() + expected > deadline:
            break
        # Without random numbers: a resumed run must find the generators in their saved state.
        matrix = torch.arange(size * size, dtype=torch.float32, device=device).sin().view(size, size).to(dtype)
        previous = [_Product(matrix, library, clock) for library in backend_of(device).product_libraries(dtype)]
        for product in previous:
            for _ in range(_REPEATS):
                product.run()
        measured += previous
    best = max(measured, key=lambda product: product.flops)
    while clock() < deadline:
        best.run()
    return MatmulRate(best.flops, best.size, best.library)
