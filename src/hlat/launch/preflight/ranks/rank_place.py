"""A process as checks see it: its device and rank, and the tools that they measure with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hlat.runtime.distributed.host_collectives import HostGroup


@dataclass(frozen=True)
class RankTools:
    """Functions of torch that checks of a process use.

    Attributes:
        product: multiplies two matrices.
    """

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.mm


@dataclass(frozen=True)
class RankPlace:
    """Place of measurements in a process.

    Attributes:
        device: device of this process.
        rank: rank in the run.
        tools: functions to measure with.
        ranks: all processes, once they have joined.
        groups: groups of ranks by axis, once they have joined.
    """

    device: torch.device
    rank: int
    tools: RankTools = RankTools()
    ranks: HostGroup = field(default_factory=HostGroup)
    groups: Mapping[str, list[list[int]]] = field(default_factory=dict)


Facts = dict[str, Any]
"""JSON values."""
