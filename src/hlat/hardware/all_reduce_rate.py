"""One process of an all-reduce measurement.

``python -m hlat.hardware.all_reduce_rate DEVICE BYTES`` prints the fastest all-reduce in seconds.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

from hlat.runtime.backend.device import synchronize
from hlat.runtime.distributed.join import joined_run

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


if __name__ == "__main__":
    print(json.dumps(best_seconds(sys.argv[1], int(sys.argv[2]))))  # noqa: T201  (the parent process reads it)
