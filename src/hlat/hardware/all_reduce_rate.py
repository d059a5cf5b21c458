"""The time of an all-reduce, and one process of its measurement."""

import time

import torch
import torch.distributed as dist

from hlat.runtime.backend.device import synchronize
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.join import joined_run
from hlat.runtime.helper_process import Channel

_REPEATS = 12  # the first open connections and are never the fastest


def fastest_all_reduce(message: torch.Tensor, ranks: HostGroup, group: dist.ProcessGroup | None, repeats: int) -> float:
    """Return the seconds of the fastest of some all-reduces of a tensor over a group; all ``ranks`` begin together.

    None is the default group.
    """
    best = float("inf")
    for _ in range(repeats):
        ranks.barrier()
        synchronize(message.device)
        begin = time.perf_counter()
        dist.all_reduce(message, group=group)
        synchronize(message.device)
        best = min(best, time.perf_counter() - begin)
    return best


def measure(channel: Channel, device_type: str, size: int) -> None:
    """Send the seconds of the fastest all-reduce of ``size`` bytes with the others; the work of a helper process."""
    with joined_run(device_type) as runtime:
        message = torch.zeros(size // 4, dtype=torch.float32, device=runtime.device)
        seconds = fastest_all_reduce(message, runtime.ranks, None, _REPEATS)
    channel.send(seconds)
