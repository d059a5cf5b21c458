"""All-reduce and all-gather over each axis of the layout: results, which are exact, and rates.

All groups of an axis communicate at the same time, as in training.
"""

import time

import torch
import torch.distributed as dist

from hlat.launch.preflight.ranks.rank_place import Facts, RankPlace
from hlat.runtime.backend.device import synchronize
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import device_group

_ELEMENTS = 1 << 18
_SMALL, _LARGE = 4 << 20, 64 << 20  # bytes of a message in host memory, and between accelerators
_REPEATS = 3  # the fastest counts


def measure(place: RankPlace) -> Facts:
    """Return, per axis, the collectives with wrong results, and the bytes per second that each member sends."""
    groups = []
    for axis, found in place.groups.items():
        ranks = next(ranks for ranks in found if place.rank in ranks)
        if len(ranks) == 1:
            continue
        group = _group(ranks, place.ranks.world)
        wrong = [
            name
            for name, check in (("all-reduce", _reduces), ("all-gather", _gathers))
            if not check(place, ranks, group)
        ]
        groups.append({"axis": axis, "ranks": ranks, "wrong": wrong, "rate": _rate(place, ranks, group)})
    return {"groups": groups}


def _group(ranks: list[int], world: int) -> dist.ProcessGroup:
    if len(ranks) == world:
        assert dist.group.WORLD is not None, "the processes have joined"
        return dist.group.WORLD
    return device_group(ranks)


def _pattern(place: RankPlace, rank: int) -> torch.Tensor:
    """Integers that differ between ranks; sums over thousands of ranks are exact in float32."""
    return (torch.arange(_ELEMENTS, dtype=torch.float32, device=place.device) * (rank + 1)) % 251


def _reduces(place: RankPlace, ranks: list[int], group: dist.ProcessGroup) -> bool:
    value, expected = _pattern(place, place.rank), torch.zeros(_ELEMENTS, device=place.device)
    for rank in ranks:
        expected += _pattern(place, rank)
    dist.all_reduce(value, group=group)
    return torch.equal(value, expected)


def _gathers(place: RankPlace, ranks: list[int], group: dist.ProcessGroup) -> bool:
    found = torch.empty(len(ranks) * _ELEMENTS, device=place.device)
    dist.all_gather_into_tensor(found, _pattern(place, place.rank), group=group)
    return torch.equal(found, torch.cat([_pattern(place, rank) for rank in ranks]))


def _rate(place: RankPlace, ranks: list[int], group: dist.ProcessGroup) -> float:
    size = _SMALL if backend_of(place.device).is_shared else _LARGE
    message = torch.zeros(size // 4, dtype=torch.float32, device=place.device)
    best = float("inf")
    for _ in range(_REPEATS):
        place.ranks.barrier()
        synchronize(place.device)
        begin = time.perf_counter()
        dist.all_reduce(message, group=group)
        synchronize(place.device)
        best = min(best, time.perf_counter() - begin)
    return 2 * (len(ranks) - 1) / len(ranks) * size / max(best, 1e-9)
