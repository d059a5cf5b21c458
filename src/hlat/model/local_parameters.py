"""Local parameters of a process: the local tensors, and the rows of the parameters that they hold.

    Decoder(config, shard), sharded over data-parallel ranks or not --collect_local_parameters--> LocalParameter, ...

Initialisation, norms, optimizer and checkpoints access a model through these, so that none depends on the parallel
layout.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from hlat.model.decoder import Decoder
from hlat.model.derived.parameter_layout import RowBlock, RowLayout, parameter_layouts

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class LocalParameter:
    """The rows of one parameter that this process stores.

    Attributes:
        name: the parameter's name in the complete model, such as "layers.3.attention.qkv.weight".
        parameter: the parameter that the optimizer updates.
        layout: the canonical tensors and rows that the rows of the parameter (or its tensor-parallel shard) map to.
        first_row: row of the layout that the first local row is; the other local rows follow.
        owned: True if, of all processes that store these rows, this one counts and saves them. Single canonical tensors
            of the layout may still be owned by another tensor-parallel shard (``CanonicalTensor.owned``).
    """

    name: str
    parameter: nn.Parameter
    layout: RowLayout
    first_row: int
    owned: bool

    @property
    def tensor(self) -> torch.Tensor:
        """Local rows; shares memory with the parameter."""
        return local(self.parameter.detach())

    @property
    def gradient(self) -> torch.Tensor | None:
        """Gradient of the local rows; None before the first backward pass."""
        return None if self.parameter.grad is None else local(self.parameter.grad)

    def row_blocks(self) -> list[RowBlock]:
        """Return the local rows as blocks of canonical rows, one per canonical tensor."""
        return self.layout.row_blocks(self.first_row, self.first_row + self.tensor.shape[0])

    def row_views(self, block: RowBlock, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of a block as views of a tensor of the local shape (weights, gradients or moments)."""
        return [tensor.narrow(0, run.start - self.first_row, run.count) for run in block.runs]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def _is_sharded(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Return True for a DTensor, without importing the class: the import takes a second that one process can save."""
    return hasattr(tensor, "to_local")


def collect_local_parameters(model: Decoder, owned: bool = True) -> list[LocalParameter]:
    """Collect the local parameters of a model or model shard, in order of execution.

    Args:
        model: its parameters may be sharded by rows over one mesh dimension (FSDP2), and replicated over others.
        owned: True if this process owns the parameters that FSDP2 does not shard or replicate itself.
    """
    layouts = parameter_layouts(model.config, model.shard)
    collected = []
    for name, parameter in model.named_parameters():
        first, is_first = _first_row(parameter)
        collected.append(LocalParameter(name, parameter, layouts[name], first, owned and is_first))
    return collected


def _first_row(parameter: nn.Parameter) -> tuple[int, bool]:
    """Return the first row stored of a parameter, and True if this process has its first replica."""
    if not _is_sharded(parameter):
        return 0, True
    first, is_first, rows = 0, True, parameter.shape[0]
    for dimension, placement in enumerate(parameter.placements):
        index, count = parameter.device_mesh.get_local_rank(dimension), parameter.device_mesh.size(dimension)
        if placement.is_shard():
            first = min(index * -(-rows // count), rows)  # FSDP2 splits rows like torch.chunk
        else:
            is_first = is_first and index == 0
    return first, is_first
