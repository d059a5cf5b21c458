"""The machine at hand, measured: what a catalog would say about it.

    products of matrices, copies through memory, an all-reduce -> a chip and an instance -> a user's catalog

The best of many in each case, because whatever else runs on the machine can only slow things down. What a machine
cannot know about itself, its network to others, its price and how often it fails, is left for its owner to fill in.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hlat.hardware.measure import measure_matmul
from hlat.runtime import LaunchError
from hlat.runtime.backend import describe_device, synchronize
from hlat.runtime.distributed import RUN_SECRET_ENV

_COPY_BYTES = 256 << 20  # larger than any cache
_MESSAGE_BYTES = 32 << 20
_SECONDS = 120.0  # for processes to start, meet and exchange


@dataclass(frozen=True)
class MeasuredMachine:
    """Rates of this machine.

    Attributes:
        name: of the device.
        devices: torch devices that exchange messages.
        flops: FLOP/s of one device by dtype.
        memory_bytes, memory_rate: of one device; bytes, and bytes per second read and written by a copy.
        link_rate: bytes per second that one device sends in an all-reduce; None with a single device.
    """

    name: str
    devices: int
    flops: dict[str, float]
    memory_bytes: int
    memory_rate: float
    link_rate: float | None

    def catalog(self, name: str) -> dict[str, Any]:
        """The content of a user's catalog in which this machine is the instance ``name``."""
        here = "measured"
        link = round((self.link_rate or self.memory_rate) / 1e9, 3)
        chip = {
            "name": f"{name} device",
            "names": [self.name],
            "family": "measured",
            "memory": {
                "gib": round(self.memory_bytes / (1 << 30), 2),
                "gb_per_second": round(self.memory_rate / 1e9, 2),
                "source": here,
            },
            "reached": {"bfloat16": 1.0, "source": here},
            "tflops": {dtype: {"dense": round(rate / 1e12, 4), "source": here} for dtype, rate in self.flops.items()},
        }
        instance = {
            "name": name,
            "chip": chip["name"],
            "chips": self.devices,
            "domain": self.devices,
            "link": link,
            "network": link,
            "source": here,
            "failures": {"per_day": 0.0, "source": here},
        }
        return {"sources": {here: f"measured by hlat on {self.name}"}, "chips": [chip], "instances": [instance]}


def measure_machine(
    device: torch.device, *, budget_seconds: float = 1.0, clock: Callable[[], float] = time.perf_counter
) -> MeasuredMachine:
    """Measure products, memory and collectives of this machine.

    Args:
        device: one of its devices; the others are taken to be like it. A CPU is one device, and its collective is that
            of two processes.
        budget_seconds: for each dtype of products, and for copies.

    Raises:
        LaunchError: the processes that exchange messages did not come to an end.
    """
    accelerated = device.type != "cpu"
    count = torch.accelerator.device_count() if accelerated else 1
    flops = {
        dtype: measure_matmul(device, getattr(torch, dtype), budget_seconds=budget_seconds, clock=clock).flops
        for dtype in ("bfloat16", "float32")
    }
    rate = _copy_rate(device, budget_seconds, clock)
    link = _all_reduce_rate(device.type, max(count, 2)) if count > 1 or not accelerated else None
    return MeasuredMachine(describe_device(device), count, flops, _memory(device), rate, link)


def _memory(device: torch.device) -> int:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def _copy_rate(device: torch.device, seconds: float, clock: Callable[[], float]) -> float:
    """Bytes per second, read and written, of copies from one large tensor to another."""
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
    """Bytes per second that each of so many processes on this machine sends."""
    port, secret = _free_port(), secrets.token_hex(32)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "hlat.hardware.all_reduce_rate", device_type, str(_MESSAGE_BYTES)],
            stdout=subprocess.PIPE,
            env=os.environ
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                RUN_SECRET_ENV: secret,
            },
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=_SECONDS)[0] for process in processes]
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"an all-reduce of {world} processes on this machine took over {_SECONDS:.0f} s") from error
    finally:
        for process in processes:
            process.kill()
    failed = [process.returncode for process in processes if process.returncode]
    if failed:
        raise LaunchError(f"a process that was to measure an all-reduce here ended with exit code {failed[0]}")
    seconds = max(float(json.loads(one.splitlines()[-1])) for one in said)
    return 2 * (world - 1) / world * _MESSAGE_BYTES / seconds


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
