r"""Rates of this machine: the peak FLOP/s of a device, from the catalog or measured; a measured entry for the catalog.

    device -> its chip, if in the catalog -> the catalog's figure, never that of a similar chip
       \-> otherwise -> measure_matmul: a short burst of square matrix products
    matrix products, memory copies, an all-reduce -> a chip and an instance -> a user's catalog

    sizes 512, 1024, ... while they fit the budget, by each library that training multiplies with
        -> the fastest again until the budget is spent -> 2 n^3 / seconds

The peak is the denominator of MFU. Each rate is the best of many repetitions, since other processes can only slow it
down. It is the best of the libraries too: a product of training by any of them then needs a share of the peak, never
more. A machine cannot measure its network to other machines, its price or its failure rate; the user fills these in.
"""

import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hlat.hardware.catalog import Catalog, Chip, load_catalog
from hlat.runtime.backend.device import PRODUCTS, synchronize
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.network import RUN_SECRET_ENV
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import LaunchError
from hlat.runtime.helper_process import PeerEnded, start_program
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


def peak_again(before: PeakFlops, device: torch.device, dtype: torch.dtype) -> PeakFlops:
    """Return the better of a measured peak and a new measurement; a published one as it is."""
    # The first may have shared the device with another program.
    return (
        before if published_flops(device, dtype) else max(before, _measured(device, dtype), key=lambda peak: peak.value)
    )


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


_COPY_BYTES = 256 << 20  # larger than any cache
_MESSAGE_BYTES = 32 << 20
_TIMEOUT_SECONDS = 120.0  # for processes to start, join and finish


@dataclass(frozen=True)
class MeasuredMachine:
    """Rates of products, copies and an all-reduce here."""

    name: str  # of the device
    devices: int
    flops: dict[str, float]  # FLOP/s of one device, by dtype
    memory_bytes: int  # per device
    memory_rate: float  # bytes per second that a copy reads and writes on one device
    link_rate: float | None  # bytes per second sent by a device in an all-reduce; None with one device

    def catalog(self, name: str) -> dict[str, Any]:
        """Content of a user's catalog in which this machine is the instance ``name``."""
        source = "measured"
        link = round((self.link_rate or self.memory_rate) / 1e9, 3)
        chip = {
            "name": f"{name} device",
            "names": [self.name],
            "family": "measured",
            "memory": {
                "gib": round(self.memory_bytes / (1 << 30), 2),
                "gb_per_second": round(self.memory_rate / 1e9, 2),
                "source": source,
            },
            # The rate is measured: products reach it.
            "reached": {"bfloat16": 1.0, "source": source},
            "tflops": {dtype: {"dense": round(rate / 1e12, 4), "source": source} for dtype, rate in self.flops.items()},
        }
        instance = {
            "name": name,
            "chip": chip["name"],
            "chips": self.devices,
            "domain": self.devices,
            "link": link,
            "network": link,
            "source": source,
            "failures": {"per_day": 0.0, "source": source},
        }
        return {"sources": {source: f"measured by hlat on {self.name}"}, "chips": [chip], "instances": [instance]}


def measure_machine(device: torch.device, *, budget_seconds: float = 1.0) -> MeasuredMachine:
    """Measure matrix products, memory and collectives of this machine.

    Other devices are assumed to be equal to ``device``. A CPU counts as one; its all-reduce is between two processes.
    The budget is for each dtype of the products, and for the copies. LaunchError: the all-reduce failed or timed out.
    """
    backend = backend_of(device)
    count = backend.device_count()
    flops = {
        dtype: measure_matmul(device, getattr(torch, dtype), budget_seconds=budget_seconds).flops
        for dtype in ("bfloat16", "float32")
    }
    rate = _copy_rate(device, budget_seconds, time.perf_counter)
    link = _all_reduce_rate(device.type, max(count, 2)) if count > 1 or backend.is_shared else None
    return MeasuredMachine(backend.describe(device), count, flops, backend.memory_bytes(device), rate, link)


def _copy_rate(device: torch.device, seconds: float, clock: Callable[[], float]) -> float:
    """Bytes per second, read and written, of copies between two large tensors."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    deadline, best = clock() + seconds, float("inf")
    while clock() < deadline or best == float("inf"):
        synchronize(device)
        begin = clock()
        target.copy_(source)
        synchronize(device)
        best = min(best, max(clock() - begin, 1e-9))
    return 2 * _COPY_BYTES / best


def _all_reduce_rate(device_type: str, world: int) -> float:
    """Bytes per second that each of ``world`` processes on this machine sends in an all-reduce."""
    common = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        RUN_SECRET_ENV: secrets.token_hex(32),
    }
    processes = [
        start_program(
            "hlat.hardware.all_reduce_rate:measure",
            *(device_type, _MESSAGE_BYTES),
            name="a process of the all-reduce measurement",
            environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world)
    ]
    until = time.monotonic() + _TIMEOUT_SECONDS
    try:
        seconds = [process.receive(until - time.monotonic()) for process in processes]
    except PeerEnded as end:
        raise LaunchError(f"a process of the all-reduce measurement exited with code {end.code}") from end
    except RuntimeError as error:  # of gloo or NCCL, with its traceback
        raise LaunchError(str(error)) from error
    finally:
        for process in processes:
            process.kill()
    if None in seconds:
        limit = f"{_TIMEOUT_SECONDS:.0f} s"
        raise LaunchError(f"an all-reduce of {plural(world, 'process')} on this machine took over {limit}")
    slowest: float = max(seconds)  # ends the all-reduce
    # A ring sends (n - 1) / n of the message twice: scatter and gather.
    return 2 * (world - 1) / world * _MESSAGE_BYTES / slowest


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
