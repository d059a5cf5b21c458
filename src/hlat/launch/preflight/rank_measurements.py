"""Measurements of a rank process, for the checks of ``rank_checks``: each function returns facts, as JSON values.

    RankPlace (device, rank, all processes once they have joined)
        device, memory   its name, after an allocation; free and total bytes
        software         versions of libraries and driver, hash of hlat's source files
        matmul           integers: exact in float32, whatever the order of the sums --> compared with numpy, on the host
                         sines: rounded --> equal devices with equal software give equal bits
        matmul_rate      products over half a second, in all processes at the same time, as in training
        collectives      all-reduce and all-gather over each axis: results, which are exact, and rates; all groups of an
                         axis communicate at the same time, as in training
        links            data from the two hosts before this one --> bytes per second
        clock            rank 0's clock, read between two readings of the own one --> difference, and bound of its error

The kind of a device is everything that may change the order of sums: chip, processor, torch, threads.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hlat.hardware import fastest_all_reduce, measure_matmul, published_flops
from hlat.runtime.backend.device import synchronize
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.join import code_identity, device_group


@dataclass(frozen=True)
class RankPlace:
    """The process that measures: its device, and the other processes once they have joined."""

    device: torch.device
    rank: int
    ranks: HostGroup = field(default_factory=HostGroup)  # all processes, once they have joined
    nproc: int = 1  # processes per host
    # groups of ranks by axis, once they have joined
    groups: Mapping[str, list[list[int]]] = field(default_factory=dict)


Facts = dict[str, Any]
"""JSON values."""


def measure_device(place: RankPlace) -> Facts:
    """Return the description of the device, after it has stored and returned a value."""
    stored = torch.full((1024,), 3.0, device=place.device)
    synchronize(place.device)
    if float(stored.sum().item()) != 3072.0:
        raise RuntimeError(f"{place.device} does not return the values that were stored on it")
    return {"device": backend_of(place.device).describe(place.device)}


def measure_memory(place: RankPlace) -> Facts:
    """Return free and total bytes of the device, and if this process has used it by joining; nothing on the host."""
    backend = backend_of(place.device)
    if backend.is_shared:
        return {}
    free, total = backend.free_memory_bytes(place.device), backend.memory_bytes(place.device)
    return {"free": free, "total": total, "joined": place.ranks.world > 1}


def measure_software(place: RankPlace) -> Facts:
    """Return versions of libraries and driver, and the hash of hlat's source."""
    versions = dict(code_identity())
    return {"source": versions.pop("source"), "versions": {**versions, **backend_of(place.device).software()}}


_EXACT_SIZE = 256  # sums of 256 products of -4 to 4 stay below 2^13, and exact
_ROUNDED_SIZE = 512
_PRODUCT_REPEATS = 3  # the bits must be the same each time


def measure_products(place: RankPlace) -> Facts:
    """Return the first wrong element of an exact product, and hashes of a rounded one."""
    # Made on the host, so that devices multiply the same bits.
    values = torch.arange(_ROUNDED_SIZE * _ROUNDED_SIZE, dtype=torch.float32).sin().view(_ROUNDED_SIZE, _ROUNDED_SIZE)
    left = values.to(place.device)
    right = left.t().contiguous()
    hashes = [
        hashlib.blake2b(torch.mm(left, right).cpu().numpy().tobytes(), digest_size=8).hexdigest()
        for _ in range(_PRODUCT_REPEATS)
    ]
    return {"wrong": _wrong_element(place), "hashes": hashes, "kind": device_kind(place.device)}


def _wrong_element(place: RankPlace) -> dict[str, int | float] | None:
    index = np.arange(_EXACT_SIZE * _EXACT_SIZE, dtype=np.int64).reshape(_EXACT_SIZE, _EXACT_SIZE)
    left, right = index * 7 % 9 - 4, index * 5 % 7 - 3
    expected = left @ right  # integers: numpy adds them without a floating-point library
    product = torch.mm(
        torch.from_numpy(left).to(place.device, torch.float32), torch.from_numpy(right).to(place.device, torch.float32)
    )
    found = product.cpu().numpy()
    places = np.argwhere(found != expected)
    if not len(places):
        return None
    row, column = (int(number) for number in places[0])
    value = float(found[row, column])
    return {"row": row, "column": column, "value": value, "expected": int(expected[row, column])}


def device_kind(device: torch.device) -> str:
    """Return everything that may change the bits of a product: chip, processor, torch, threads."""
    backend = backend_of(device)
    parts = [backend.describe(device), str(torch.__version__)]
    if backend.uses_host_threads:
        parts.append(_processor())
    return ", ".join(parts)


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""


_RATE_SECONDS = 0.5
_RATE_ATTEMPTS = 4  # a process that seems slow measures again: another program may have interrupted it
_SLOW_SHARE = 0.5  # share of the fastest process


def measure_product_rate(place: RankPlace) -> Facts:
    """Return FLOP/s, sustained, and the published peak if the chip is known."""
    dtype = backend_of(place.device).product_dtype(torch.bfloat16)
    size = measure_matmul(place.device, dtype, budget_seconds=0.15).size
    best = 0.0
    for _ in range(_RATE_ATTEMPTS):
        # All processes compute at the same time, as in training.
        place.ranks.barrier()
        best = max(best, _sustained_flops(place.device, dtype, size))
        rates = place.ranks.all_gather(best)
        if min(rates) > _SLOW_SHARE * max(rates):
            break
    peak = published_flops(place.device, dtype)
    return {
        "flops": best,
        "peak": None if peak is None else peak.value,
        "dtype": str(dtype).removeprefix("torch."),
        "kind": device_kind(place.device),
        "shared": backend_of(place.device).is_shared,
    }


def _sustained_flops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s over a fixed time, interruptions included."""
    left = torch.arange(size * size, dtype=torch.float32, device=device).sin().view(size, size).to(dtype)
    out, count, begin = torch.empty_like(left), 0, time.perf_counter()
    synchronize(device)
    while (elapsed := time.perf_counter() - begin) < _RATE_SECONDS:
        torch.mm(left, left, out=out)
        synchronize(device)
        count += 1
    return 2.0 * size**3 * count / elapsed


_PATTERN_ELEMENTS = 1 << 18
_SMALL_MESSAGE, _LARGE_MESSAGE = 4 << 20, 64 << 20  # bytes of a message in host memory, and between accelerators
_MESSAGE_REPEATS = 3  # the fastest counts


def measure_collectives(place: RankPlace) -> Facts:
    """Return, per axis, the collectives with wrong results, and the bytes per second that each member sends."""
    groups = []
    for axis, found in place.groups.items():
        ranks = next(ranks for ranks in found if place.rank in ranks)
        if len(ranks) == 1:
            continue
        group = _group_of(ranks, place.ranks.world)
        wrong = [
            name
            for name, check in (("all-reduce", _reduces), ("all-gather", _gathers))
            if not check(place, ranks, group)
        ]
        groups.append({"axis": axis, "ranks": ranks, "wrong": wrong, "rate": _reduce_rate(place, ranks, group)})
    return {"groups": groups}


def _group_of(ranks: list[int], world: int) -> dist.ProcessGroup:
    if len(ranks) == world:
        assert dist.group.WORLD is not None, "the processes have joined"
        return dist.group.WORLD
    return device_group(ranks)


def _pattern(place: RankPlace, rank: int) -> torch.Tensor:
    """Integers that differ between ranks."""
    # Below 251: sums over 66,000 ranks stay below 2^24, and exact in float32.
    return (torch.arange(_PATTERN_ELEMENTS, dtype=torch.float32, device=place.device) * (rank + 1)) % 251


def _reduces(place: RankPlace, ranks: list[int], group: dist.ProcessGroup) -> bool:
    value, expected = _pattern(place, place.rank), torch.zeros(_PATTERN_ELEMENTS, device=place.device)
    for rank in ranks:
        expected += _pattern(place, rank)
    dist.all_reduce(value, group=group)
    return torch.equal(value, expected)


def _gathers(place: RankPlace, ranks: list[int], group: dist.ProcessGroup) -> bool:
    found = torch.empty(len(ranks) * _PATTERN_ELEMENTS, device=place.device)
    dist.all_gather_into_tensor(found, _pattern(place, place.rank), group=group)
    return torch.equal(found, torch.cat([_pattern(place, rank) for rank in ranks]))


def _reduce_rate(place: RankPlace, ranks: list[int], group: dist.ProcessGroup) -> float:
    size = _SMALL_MESSAGE if backend_of(place.device).is_shared else _LARGE_MESSAGE
    message = torch.zeros(size // 4, dtype=torch.float32, device=place.device)
    best = fastest_all_reduce(message, place.ranks, group, _MESSAGE_REPEATS)
    # bytes that each member of a ring sends: reduce-scatter, then all-gather
    return 2 * (len(ranks) - 1) / len(ranks) * size / max(best, 1e-9)


_LINK_BYTES = 4 << 20  # a third of a second at 100 Mbit/s
_LINK_REPEATS = 8  # the fastest counts: other programs can only slow a message down
_CLOCK_REPEATS = 5  # the one that took least time counts


def measure_links(place: RankPlace) -> Facts:
    """Return the bytes per second that the first process of a host receives from those of the two hosts before it."""
    ranks, rates = place.ranks, []
    sent, received = torch.zeros(_LINK_BYTES, dtype=torch.uint8), torch.empty(_LINK_BYTES, dtype=torch.uint8)
    # Every host sends twice and receives twice, however many there are.
    for step in (place.nproc, 2 * place.nproc):
        if step >= ranks.world:
            break
        source, target, best = (place.rank - step) % ranks.world, (place.rank + step) % ranks.world, float("inf")
        is_first = place.rank % place.nproc == 0
        for _ in range(_LINK_REPEATS):
            ranks.barrier()
            begin = time.perf_counter()
            ranks.exchange({target: sent} if is_first else {}, {source: received} if is_first else {})
            best = min(best, time.perf_counter() - begin)
        if is_first:
            rates.append([source, _LINK_BYTES / max(best, 1e-9)])
    return {"rates": rates}


def measure_clock(place: RankPlace) -> Facts:
    """Return the seconds by which this clock is ahead of rank 0's, and the bound of the error."""
    best = (0.0, float("inf"))
    for _ in range(_CLOCK_REPEATS):
        begin = time.time()
        place.ranks.barrier()  # rank 0 reads its clock after that, and before this process receives the reading
        first = place.ranks.all_gather(time.time())[0]
        half = (time.time() - begin) / 2
        best = min(best, (begin + half - first, half), key=lambda found: found[1])
    return {"offset": best[0], "error_bound": best[1]}


MEASUREMENTS: dict[str, Callable[[RankPlace], Facts]] = {
    "device": measure_device,
    "memory": measure_memory,
    "software": measure_software,
    "matmul": measure_products,
    "matmul_rate": measure_product_rate,
    "collectives": measure_collectives,
    "links": measure_links,
    "clock": measure_clock,
}
"""Measurements of a rank process for a check, by ``HealthCheck.module``."""
