"""The state that a process saves: rectangular chunks of named tensors.

    LocalParameters, moments, RNG states --collect--> TensorChunk, TensorChunk, ...

The chunks of all processes together cover each tensor exactly once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class TensorChunk:
    """A rectangular chunk of a named tensor.

    Attributes:
        name: name of the tensor in the checkpoint.
        shape: shape of the full tensor.
        offsets: index of the chunk's first element in the full tensor, one number per dimension.
        rows: the chunk, split along its first dimension into consecutive tensors: views of live tensors on any device.
            There are several because a parameter that fuses several tensors interleaves their rows.
        replicated: True if every process has this chunk, in which case rank 0 writes it. False if no other process
            has it.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: tuple[torch.Tensor, ...]
    replicated: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the chunk."""
        first = self.rows[0].shape
        return tuple(first) if len(self.rows) == 1 else (sum(rows.shape[0] for rows in self.rows), *first[1:])

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the tensor."""
        return self.rows[0].dtype

    @property
    def nbytes(self) -> int:
        """Size of the chunk in bytes."""
        return sum(rows.nbytes for rows in self.rows)

    def tensor(self) -> torch.Tensor:
        """The chunk as one contiguous CPU tensor, whose storage has exactly its size.

        Shares memory with ``rows`` where that is possible.
        """
        return _compact(self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows))


@dataclass(frozen=True)
class ComputedChunk(TensorChunk):
    """A chunk whose values are computed when it is written, so that few chunks are in memory at a time.

    Its ``rows`` have shape and dtype but no values (meta device).

    Attributes:
        compute: returns the values. Several chunks may be computed at the same time, each in a thread of its own.
    """

    compute: Callable[[], torch.Tensor] = field(kw_only=True)

    def tensor(self) -> torch.Tensor:
        """Compute the chunk, as one contiguous CPU tensor whose storage has exactly its size."""
        return _compact(self.compute())


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def replicated_chunks(tensors: Mapping[str, torch.Tensor]) -> list[TensorChunk]:
    """One chunk per tensor, covering all of it, for tensors that every process has; rank 0 writes them."""
    return [
        TensorChunk(name, tuple(tensor.shape), (0,) * tensor.ndim, (tensor,), replicated=True)
        for name, tensor in tensors.items()
    ]
