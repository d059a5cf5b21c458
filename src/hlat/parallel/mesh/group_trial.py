"""Try what a process group of the device can do, before training: releases of a library may differ in that.

groups of this rank --small collectives with known results--> nothing, or a LaunchError that names group and operation

A collective may also return without an error and have done nothing, so every result is compared.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hlat.parallel.mesh.collectives import all_gather, reduce_scatter
from hlat.parallel.mesh.process_groups import ProcessGroups
from hlat.runtime.errors import LaunchError

_DTYPES = (torch.float32, torch.bfloat16, torch.int32)
_ADVICE = "Use a layout without it, run.device=cpu, or another release of the library."


def try_groups(groups: ProcessGroups, device: torch.device) -> None:
    """Try all process groups of this rank. Collective; each group communicates a few bytes.

    Args:
        groups: process groups of this rank.
        device: device of this rank.

    Raises:
        LaunchError: an operation that training needs failed, or its result is wrong.
    """
    for name, group in _named(groups):
        for dtype in _DTYPES:
            _try(name, f"all-reduce of {dtype}", group, partial(_all_reduce, group, dtype, device))
        _try(name, "all-gather", group, partial(_all_gather, group, device))
        _try(name, "reduce-scatter", group, partial(_reduce_scatter, group, device))
    if groups.pipeline is not None:
        _try("pipeline", "send and receive", groups.pipeline, partial(_ring, groups.pipeline, device))


def _named(groups: ProcessGroups) -> Iterator[tuple[str, ProcessGroup]]:
    seen = set()
    for name in ("pipeline", "data", "context", "tensor", "gradients", "kv", "embedding"):
        group = getattr(groups, name)
        if group is not None and id(group) not in seen:
            seen.add(id(group))
            yield name, group


def _try(name: str, operation: str, group: ProcessGroup, trial: Callable[[], tuple[list[float], list[float]]]) -> None:
    ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
    try:
        found, expected = trial()
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise LaunchError(
            f"{operation} does not work in the {name} group of ranks {ranks}: {reason}. {_ADVICE}"
        ) from error
    if found != expected:
        message = (
            f"{operation} gives a wrong result in the {name} group of ranks {ranks}: {found} instead of {expected}."
        )
        raise LaunchError(f"{message} {_ADVICE}")


def _all_reduce(group: ProcessGroup, dtype: torch.dtype, device: torch.device) -> tuple[list[float], list[float]]:
    values = torch.full((2,), group.rank() % 2 + 1, dtype=dtype, device=device)
    dist.all_reduce(values, group=group)
    return values.tolist(), [sum(rank % 2 + 1 for rank in range(group.size()))] * 2


def _all_gather(group: ProcessGroup, device: torch.device) -> tuple[list[float], list[float]]:
    gathered = all_gather(torch.full((2,), float(group.rank()), device=device), group)
    return gathered.flatten().tolist(), [float(rank) for rank in range(group.size()) for _ in range(2)]


def _reduce_scatter(group: ProcessGroup, device: torch.device) -> tuple[list[float], list[float]]:
    terms = torch.arange(group.size(), dtype=torch.float32, device=device).unsqueeze(1).expand(-1, 2)
    return reduce_scatter(terms, group).tolist(), [float(group.rank() * group.size())] * 2


def _ring(group: ProcessGroup, device: torch.device) -> tuple[list[float], list[float]]:
    """Send to the next rank and receive from the one before: even ranks send first, the others receive first."""
    rank, size = group.rank(), group.size()
    sent, received = (torch.full((2,), float(value), device=device) for value in (rank, -1))
    before, after = (rank - 1) % size, (rank + 1) % size
    steps: list[Callable[[], object]] = [
        partial(dist.send, sent, group=group, group_dst=after),
        partial(dist.recv, received, group=group, group_src=before),
    ]
    for step in steps if rank % 2 == 0 else reversed(steps):
        step()
    return received.tolist(), [float(before)] * 2
