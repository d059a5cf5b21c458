"""What a process has of the state to be saved: rectangular blocks of named tensors.

HeldParameters, moments, generators --collect--> Block, Block, ...     of every process, covering each tensor once
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorChunk:
    """A block of a named tensor.

    Attributes:
        name: of the tensor in the checkpoint.
        shape: of the whole tensor.
        offsets: where the block begins in it, one number per dimension.
        rows: the block, cut along its first dimension into tensors that lie one after another in it; views of live
            tensors on any device. A parameter that fuses several tensors interleaves their rows.
        replicated: whether every process has this block; the first one writes it. Otherwise no other process has it.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: tuple[torch.Tensor, ...]
    replicated: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its own shape."""
        first = self.rows[0].shape
        return tuple(first) if len(self.rows) == 1 else (sum(part.shape[0] for part in self.rows), *first[1:])

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return self.rows[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return sum(part.nbytes for part in self.rows)

    def tensor(self) -> torch.Tensor:
        """The block on the CPU, contiguous, in a storage of its own size; shares the memory of ``rows`` if it can."""
        whole = self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows)
        whole = whole.detach().cpu().contiguous()
        return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()


def replicated_chunks(tensors: Mapping[str, torch.Tensor]) -> list[TensorChunk]:
    """Whole tensors as blocks, which the first process writes."""
    return [
        TensorChunk(name, tuple(tensor.shape), (0,) * tensor.ndim, (tensor,), replicated=True)
        for name, tensor in tensors.items()
    ]
