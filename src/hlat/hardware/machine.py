"""Measurement of this machine, as an entry for the hardware catalog.

    matrix products, memory copies, an all-reduce -> a chip and an instance -> a user's catalog

Each rate is the best of many repetitions, since other processes can only slow them down. A machine cannot measure its
network to other machines, its price or its failure rate; the user fills these in.
"""

import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hlat.hardware.peak import measure_matmul
from hlat.runtime.backend.device import synchronize
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.run_secret import RUN_SECRET_ENV
from hlat.runtime.errors import LaunchError
from hlat.runtime.helper_process import PeerEnded, start_program
from hlat.runtime.terminal import plural

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


def measure_machine(
    device: torch.device, *, budget_seconds: float = 1.0, clock: Callable[[], float] = time.perf_counter
) -> MeasuredMachine:
    """Measure matrix products, memory and collectives of this machine.

    Other devices are assumed to be equal to ``device``. A CPU counts as one; its all-reduce is between two processes.
    The budget is for each dtype of the products, and for the copies. LaunchError: the all-reduce failed or timed out.
    """
    backend = backend_of(device)
    count = backend.device_count()
    flops = {
        dtype: measure_matmul(device, getattr(torch, dtype), budget_seconds=budget_seconds, clock=clock).flops
        for dtype in ("bfloat16", "float32")
    }
    rate = _copy_rate(device, budget_seconds, clock)
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
