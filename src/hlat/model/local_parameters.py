"""What a process holds of the parameters: local tensors, and which rows of which parameter they are.

    Decoder(config, part), sharded over the data-parallel ranks or not --collect_local_parameters--> LocalParameter ...

Initialisation, norms and checkpoints see a model through these, so that none of them has to know the layout.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from hlat.model.decoder import Decoder
from hlat.model.derived import RowBlock, RowLayout, parameter_layouts

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class LocalParameter:
    """The rows of one parameter that are in this process.

    Attributes:
        name: the parameter's name in the whole model, such as "layers.3.attention.qkv.weight".
        parameter: the parameter that the optimizer steps.
        layout: which rows of canonical tensors the rows of the (tensor-parallel share of the) parameter are.
        first_row: the first row held here; as many follow as the local tensor has.
        owned: whether this process is the one, of those that hold these rows, to count and save them. Parts of the
            layout may be owned by another tensor-parallel share nevertheless.
    """

    name: str
    parameter: nn.Parameter
    layout: RowLayout
    first_row: int
    owned: bool

    @property
    def tensor(self) -> torch.Tensor:
        """The local rows; shares memory with the parameter."""
        return local(self.parameter.detach())

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient of the local rows; None before the first backward pass."""
        return None if self.parameter.grad is None else local(self.parameter.grad)

    def row_blocks(self) -> list[RowBlock]:
        """The local rows as blocks of canonical tensors."""
        return self.layout.row_blocks(self.first_row, self.first_row + self.tensor.shape[0])

    def row_views(self, piece: RowBlock, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The rows of a piece, as views of a tensor of the local shape (weights, gradients or moments)."""
        return [tensor.narrow(0, run.start - self.first_row, run.count) for run in piece.runs]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is in this process."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def _is_sharded(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor; asked this way because importing those takes a second, which one process can save."""
    return hasattr(tensor, "to_local")


def collect_local_parameters(model: Decoder, owned: bool = True) -> list[LocalParameter]:
    """Every parameter of a model or a part of one, in the order of the data.

    Args:
        model: its parameters may be sharded by rows over one mesh dimension (FSDP2), and replicated over others.
        owned: whether this process owns what it holds, as far as the model itself does not say.
    """
    layouts = parameter_layouts(model.config, model.shard)
    held = []
    for name, parameter in model.named_parameters():
        first, is_first = _first_row(parameter)
        held.append(LocalParameter(name, parameter, layouts[name], first, owned and is_first))
    return held


def _first_row(parameter: nn.Parameter) -> tuple[int, bool]:
    """The first row held of a parameter, and whether this is the first replica of it."""
    if not _is_sharded(parameter):
        return 0, True
    first, is_first, rows = 0, True, parameter.shape[0]
    for dimension, placement in enumerate(parameter.placements):
        index, count = parameter.device_mesh.get_local_rank(dimension), parameter.device_mesh.size(dimension)
        if placement.is_shard():
            first = min(index * -(-rows // count), rows)  # FSDP2 cuts like torch.chunk
        else:
            is_first = is_first and index == 0
    return first, is_first
