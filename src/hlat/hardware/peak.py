r"""Peak FLOP/s of a device, the denominator of MFU: from the catalog, or measured. Never that of a similar chip.

    device -> its chip, if in the catalog -> the catalog's figure
       \-> otherwise -> measure_matmul: a short burst of square matrix products

    sizes 512, 1024, ... while they fit the budget, by each library that training multiplies with
        -> the fastest again until the budget is spent -> 2 n^3 / seconds

A measured peak is the best of many repetitions, since other processes can only slow a product down. It is the best of
the libraries too: a product of training by any of them then needs a share of the peak, never more.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hlat.hardware.catalog import Catalog, Chip, load_catalog
from hlat.runtime.backend.device import PRODUCTS, synchronize
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.terminal import plural


@sendable
@dataclass(frozen=True)
class PeakFlops:
    """Peak rate of one device."""

    value: float
    """Dense FLOP/s; a multiply-add counts as two."""
    source: str
    """Source of the value: a publication, or ``measured here``."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> PeakFlops:
    """Peak dense FLOP/s of matrix products on one device: published for exactly this chip, else measured."""
    # float32 means TF32 if torch is set to use it. bfloat16 means float32 on a CPU without bf16 instructions, where
    # hlat widens the operands. A measurement takes about 0.3 s.
    return published_flops(device, dtype) or _measured(device, dtype)


def published_flops(device: torch.device, dtype: torch.dtype) -> PeakFlops | None:
    """Published peak of one device; None if the catalog has no figure for exactly this chip and dtype."""
    catalog = load_catalog()
    chip = device_chip(device, catalog)
    return None if chip is None else _published(chip, catalog, device, dtype)


def device_chip(device: torch.device, catalog: Catalog) -> Chip | None:
    """Chip of a device; None if the catalog does not have it."""
    backend = backend_of(device)
    name = backend.chip_name(device)
    chip = catalog.chip_by_torch_name(name) if name is not None else None
    instance = backend.instance_type(device) if chip is None else None
    return chip if instance is None else catalog.chip_by_instance_type(instance)


def _published(chip: Chip, catalog: Catalog, device: torch.device, dtype: torch.dtype) -> PeakFlops | None:
    backend = backend_of(device)
    cores, number_format = backend.cores_per_device() or chip.cores_per_device, backend.product_format(dtype)
    value = chip.flops(number_format, cores)
    if value is None:
        return None
    share = f", {cores} of {chip.cores} cores" if cores != chip.cores else ""
    source = catalog.sources[chip.tflops[number_format].source]
    return PeakFlops(value, f"{chip.name}{share}, {number_format}: {source}")


def _measured(device: torch.device, dtype: torch.dtype) -> PeakFlops:
    backend = backend_of(device)
    computed = backend.product_dtype(dtype)
    best = measure_matmul(device, computed)
    name = str(computed).removeprefix("torch.")
    threads = f" on {plural(torch.get_num_threads(), 'thread')}" if backend.uses_host_threads else ""
    widening = ", in which bfloat16 is computed here" if computed != dtype else ""
    products = f"{name} products of {best.size} x {best.size} by {best.library}"
    return PeakFlops(best.flops, f"measured here: {products}{threads}{widening}")


_MATMUL_SIZES = (512, 1024, 2048, 4096, 8192)
_MATMUL_REPEATS = (
    3  # per size and library; the first includes kernel selection and thread start-up, and is never the fastest
)


@dataclass(frozen=True)
class MatmulRate:
    """Best rate of a burst of products."""

    flops: float  # per second; a multiply-add counts as two
    size: int  # n of the (n, n) matrices that reached it
    library: str  # a key of PRODUCTS


class _Product:
    """One square product by one library, timed repeatedly."""

    def __init__(self, matrix: torch.Tensor, library: str, clock: Callable[[], float]) -> None:
        self.size, self.library = len(matrix), library
        self.seconds = float("inf")  # the fastest so far
        self._matrix, self._multiply, self._clock = matrix, PRODUCTS[library], clock

    def run(self) -> None:
        # Accelerators run behind the host.
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

    ``dtype`` is one in which the device multiplies (``Backend.product_dtype``).
    """
    deadline = clock() + budget_seconds
    measured: list[_Product] = []
    previous: list[_Product] = []
    for size in _MATMUL_SIZES:
        # A size is measured if its time, extrapolated from the previous size, fits into what is left of the budget. The
        # smallest always is.
        expected = _MATMUL_REPEATS * sum(product.seconds * (size / product.size) ** 3 for product in previous)
        if previous and clock() + expected > deadline:
            break
        # Without random numbers: a resumed run must find the generators in their saved state.
        matrix = torch.arange(size * size, dtype=torch.float32, device=device).sin().view(size, size).to(dtype)
        previous = [_Product(matrix, library, clock) for library in backend_of(device).product_libraries(dtype)]
        for product in previous:
            for _ in range(_MATMUL_REPEATS):
                product.run()
        measured += previous
    best = max(measured, key=lambda product: product.flops)
    # Other processes only slow a product down: more repetitions come closer to its rate.
    while clock() < deadline:
        best.run()
    return MatmulRate(best.flops, best.size, best.library)
