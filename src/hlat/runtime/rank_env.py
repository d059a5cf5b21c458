"""This process's place among the processes of a run, as whoever started it wrote it into the environment.

RANK, WORLD_SIZE, LOCAL_RANK, GROUP_RANK (torchrun, ``hlat train --nproc``, a scheduler's script) --place--> Place
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hlat.runtime.errors import LaunchError

_PORTS = range(1, 1 << 16)


@dataclass(frozen=True)
class RankInfo:
    """Which process of how many this is."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0  # among the processes of this machine: the index of its accelerator
    node: int = 0  # the number of this machine


def rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo:
    """Read the place of this process.

    Without WORLD_SIZE, or where it is 1, the process is alone and nothing else is looked at. LOCAL_RANK defaults to
    RANK, which is right on one machine, and GROUP_RANK to 0.

    Raises:
        LaunchError: the variables do not describe a place; every problem is listed.
    """
    problems: list[str] = []
    world = _integer(environment, "WORLD_SIZE", problems, default=1)
    if world == 1:
        return RankInfo()
    rank = _integer(environment, "RANK", problems)
    local_rank = _integer(environment, "LOCAL_RANK", problems, default=rank)
    node = _integer(environment, "GROUP_RANK", problems, default=0)
    port = _integer(environment, "MASTER_PORT", problems)
    if not environment.get("MASTER_ADDR"):
        problems.append("MASTER_ADDR is not set: it names the machine of rank 0, 127.0.0.1 if all run on this one.")
    if world is not None and world < 1:
        problems.append(f"WORLD_SIZE={world}: it counts the processes of the run, 1 or more.")
    elif rank is not None and world is not None and not 0 <= rank < world:
        problems.append(f"RANK={rank}: with WORLD_SIZE={world} it lies between 0 and {world - 1}.")
    if local_rank is not None and local_rank < 0:
        problems.append(f"LOCAL_RANK={local_rank}: it counts the processes of one machine from 0.")
    if node is not None and node < 0:
        problems.append(f"GROUP_RANK={node}: it counts the machines of the run from 0.")
    if port is not None and port not in _PORTS:
        problems.append(f"MASTER_PORT={port}: a port lies between {_PORTS[0]} and {_PORTS[-1]}.")
    if problems:
        head = "the environment does not say which process of the run this is:"
        remedy = (
            "Start the processes with `hlat train --nproc N` or torchrun, which set all of these, or unset WORLD_SIZE."
        )
        raise LaunchError("\n".join([head, *(f"  {problem}" for problem in problems), remedy]))
    assert rank is not None and local_rank is not None and world is not None, "each missing one is a problem above"
    assert node is not None, "it has a default"
    return RankInfo(rank, world, local_rank, node)


def _integer(environment: Mapping[str, str], name: str, problems: list[str], default: int | None = None) -> int | None:
    text = environment.get(name)
    if not text:
        if default is None:
            problems.append(f"{name} is not set.")
        return default
    try:
        return int(text)
    except ValueError:
        problems.append(f"{name}={text}: it has to be a whole number.")
        return None
