"""Rank and world size of this process, read from the environment variables that its launcher set.

RANK, WORLD_SIZE, LOCAL_RANK, GROUP_RANK (from torchrun, ``hlat train --nproc``, a scheduler) --rank_info--> RankInfo
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from hlat.runtime.errors import LaunchError

_PORTS = range(1, 1 << 16)


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process among the processes of a run.

    Attributes:
        rank: global rank, 0 <= rank < world.
        world: world size, the number of processes.
        local_rank: rank among the processes of this machine, which is the index of its accelerator.
        node: index of this machine.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    node: int = 0


def host_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of this machine: Slurm's name of the node, which its commands take, or its host name."""
    return environment.get("SLURMD_NODENAME") or platform.node()


def rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo:
    """Read the rank of this process from the environment.

    Without WORLD_SIZE, or if it is 1, the process is alone and the other variables are ignored. LOCAL_RANK defaults to
    RANK, which is right on one machine, and GROUP_RANK to 0.

    Raises:
        LaunchError: the variables are incomplete or contradict each other; every problem is listed.
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
        problems.append("MASTER_ADDR is not set: it is the address of rank 0's machine, 127.0.0.1 on one machine.")
    if world is not None and world < 1:
        problems.append(f"WORLD_SIZE={world}: it is the number of processes of the run, 1 or more.")
    elif rank is not None and world is not None and not 0 <= rank < world:
        problems.append(f"RANK={rank}: with WORLD_SIZE={world} it must be between 0 and {world - 1}.")
    if local_rank is not None and local_rank < 0:
        problems.append(f"LOCAL_RANK={local_rank}: it is the index of the process on its machine, 0 or more.")
    if node is not None and node < 0:
        problems.append(f"GROUP_RANK={node}: it is the index of the machine, 0 or more.")
    if port is not None and port not in _PORTS:
        problems.append(f"MASTER_PORT={port}: a port is between {_PORTS[0]} and {_PORTS[-1]}.")
    if problems:
        head = "the environment does not say which process of the run this is:"
        remedy = (
            "Start the processes with `hlat train --nproc N` or torchrun, which set all of these, or unset WORLD_SIZE."
        )
        raise LaunchError("\n".join([head, *(f"  {problem}" for problem in problems), remedy]))
    assert rank is not None and local_rank is not None and world is not None, "missing variables are problems above"
    assert node is not None, "it has a default"
    return RankInfo(rank, world, local_rank, node)


def _integer(environment: Mapping[str, str], name: str, problems: list[str], default: int | None = None) -> int | None:
    """Integer value of an environment variable; a missing or malformed one is appended to ``problems``."""
    text = environment.get(name)
    if not text:
        if default is None:
            problems.append(f"{name} is not set.")
        return default
    try:
        return int(text)
    except ValueError:
        problems.append(f"{name}={text}: it must be an integer.")
        return None
