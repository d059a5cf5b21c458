"""One process of an all-reduce measurement."""

import time

import torch
import torch.distributed as dist

from hlat.runtime.backend.device import synchronize
from hlat.runtime.distributed.join import joined_run
from hlat.runtime.helper_process import Channel

_REPEATS = 12  # the first open connections and are never the fastest


def best_seconds(device_type: str, size: int) -> float:
    """Fastest all-reduce of ``size`` bytes between the processes that the environment describes."""
    best = float("inf")
    with joined_run(device_type) as runtime:
        message = torch.zeros(size // 4, dtype=torch.float32, device=runtime.device)
        for _ in range(_REPEATS):
            runtime.ranks.barrier()
            synchronize(runtime.device)
            begin = time.perf_counter()
            dist.all_reduce(message)
            synchronize(runtime.device)
            best = min(best, time.perf_counter() - begin)
    return best


def measure(channel: Channel, device_type: str, size: int) -> None:
    """Send the fastest all-reduce; the work of a helper process."""
    channel.send(best_seconds(device_type, size))
