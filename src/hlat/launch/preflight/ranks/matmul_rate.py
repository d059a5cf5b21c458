"""Rate of matrix products over half a second, in all processes at the same time, as in training."""

import time

import torch

from hlat.hardware import measure_matmul, published_flops
from hlat.launch.preflight.ranks.matmul import device_kind
from hlat.launch.preflight.ranks.rank_place import Facts, RankPlace
from hlat.runtime.backend.device import synchronize
from hlat.runtime.backend.table import backend_of

_SECONDS = 0.5
_ATTEMPTS = 4  # a process that seems slow measures again: another program may have interrupted it
_SLOW = 0.5  # share of the fastest process


def measure(place: RankPlace) -> Facts:
    """Return FLOP/s, sustained, and the published peak if the chip is known."""
    dtype = backend_of(place.device).product_dtype(torch.bfloat16)
    size = measure_matmul(place.device, dtype, budget_seconds=0.15).size
    best = 0.0
    for _ in range(_ATTEMPTS):
        place.ranks.barrier()
        best = max(best, _sustained(place.device, dtype, size))
        rates = place.ranks.all_gather(best)
        if min(rates) > _SLOW * max(rates):
            break
    name = str(dtype).removeprefix("torch.")
    peak = published_flops(place.device, dtype)
    published = None if peak is None else peak.value
    facts = {"flops": best, "peak": published, "dtype": name, "kind": device_kind(place.device)}
    return {**facts, "shared": backend_of(place.device).is_shared}


def _sustained(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s over a fixed time, interruptions included."""
    left = torch.arange(size * size, dtype=torch.float32, device=device).sin().view(size, size).to(dtype)
    out, count, begin = torch.empty_like(left), 0, time.perf_counter()
    synchronize(device)
    while (elapsed := time.perf_counter() - begin) < _SECONDS:
        torch.mm(left, left, out=out)
        synchronize(device)
        count += 1
    return 2.0 * size**3 * count / elapsed
