"""Plan of the exchange of whole matrices: which rank updates which matrix, and what every rank sends and receives.

    step shape, rank -> layers in batches -> owner of each matrix -> rows and columns sent to owners, and returned

An optimizer that updates hidden matrices as a whole (``OptimizerSpec.matrix_dtype``) needs their rows and columns from
all ranks that shard them (tensor parallelism, ZeRO). The ranks of a pipeline stage share the work: each matrix has one
owner among them, chosen so that their FLOPs are about equal. An owner gathers the matrix from its own replica of the
state, and returns the result to every rank that stores rows of it. So no matrix is computed twice, and copies (of
replicas, of kv heads) receive the same bits. Layers are exchanged in batches, of as many matrices as ranks unless a
rank would store too much of them.

The plan follows from shapes only; ``MatrixExchange`` executes it, and plans and rehearsals count by it.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from hlat.config import ModelConfig, OptimizerConfig
from hlat.model import ModelShard, RowBlock, RowLayout, parameter_layouts
from hlat.optim import OptimizerSpec, optimizer_spec
from hlat.parallel.stages.step_shape import StepShape

_MOST_ELEMENTS = 1 << 28  # stored by a rank of the layers of a batch, unless a single layer has more


@dataclass(frozen=True)
class Matrix:
    """A canonical hidden matrix.

    Attributes:
        layer: its layer.
        parameter: name of the parameter that has it.
        name: canonical name.
        rows, columns: its shape.
        owner: index of its owner in the members of the exchange.
    """

    layer: int
    parameter: str
    name: str
    rows: int
    columns: int
    owner: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


@dataclass(frozen=True)
class MatrixWindow:
    """Rows and columns of a matrix that a rank stores.

    Attributes:
        block: the rows, and where they are in the parameter.
        first_column, columns: the columns.
    """

    block: RowBlock
    first_column: int
    columns: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.block.rows * self.columns


@dataclass(frozen=True)
class BatchVolume:
    """Elements of the tensors of a batch on a rank.

    Attributes:
        sent, received: on the way to the owners.
        returned, results: on the way back: sent by the owner, and received.
        owned: shapes of the matrices that the rank owns.
    """

    sent: int
    received: int
    returned: int
    results: int
    owned: tuple[tuple[int, int], ...]

    def message_elements(self) -> tuple[int, int]:
        """Elements of both messages, each counted as the larger of what is sent and received."""
        return max(self.sent, self.received), max(self.returned, self.results)


class MatrixPlan:
    """Exchange of whole matrices between the ranks of a pipeline stage.

    Args:
        step: model, layout and optimizer of a training step.
        rank: a rank; all ranks with its pipeline index have the same plan.
        layers: layers of the rank, ascending.

    Attributes:
        members: ranks of the exchange, ascending.
        batches: the layers, in batches that are exchanged together.
    """

    def __init__(self, step: StepShape, rank: int, layers: Sequence[int]) -> None:
        self._step, self.rank = step, rank
        self._spec: OptimizerSpec[Any] = optimizer_spec(step.optimizer, step.mode)
        self.members = step.layout.group(rank, "dp", "cp", "tp")
        shapes = [shape for *_, shape in matrix_shapes(step.model, 0)]
        stored = sum(map(prod, shapes)) // (step.layout.tensor * (step.shards if step.sharded else 1))
        count = min(-(-len(self.members) // len(shapes)), max(1, _MOST_ELEMENTS // stored))
        self.batches = [tuple(layers[first : first + count]) for first in range(0, len(layers), count)]
        self._layouts: dict[tuple[int, int], dict[str, RowLayout]] = {}

    def matrices(self, batch: Sequence[int]) -> list[Matrix]:
        """Return the matrices of a batch of layers with their owners, in order of the parameters."""
        found = [(layer, *entry) for layer in batch for entry in matrix_shapes(self._step.model, layer)]
        shapes = tuple(shape for *_, shape in found)
        owners = _owners(self._step.optimizer, self._step.mode, shapes, len(self.members))
        return [
            Matrix(layer, parameter, name, *shape, owner)
            for (layer, parameter, name, shape), owner in zip(found, owners, strict=True)
        ]

    def section(self, rank: int, matrix: Matrix) -> MatrixWindow | None:
        """Return the rows and columns of a matrix that a rank stores; None if it has none."""
        layout = self._layer(self._step.layout.coordinates(rank).tp, matrix.layer)[matrix.parameter]
        first, stop = self._row_range(rank, layout.rows)
        for block in layout.row_blocks(first, stop):
            if block.name == matrix.name:
                return MatrixWindow(block, layout.first_column, layout.columns[0])
        return None

    def contributes(self, rank: int, owner: int) -> bool:
        """Return True if an owner, a rank, gathers from another rank: one of the same replica of the state."""
        layout, sharded = self._step.layout, self._step.sharded
        return layout.state_replica(rank, sharded) == layout.state_replica(owner, sharded)

    def sent(self, matrix: Matrix, source: int) -> MatrixWindow | None:
        """Return what a rank sends to the owner of a matrix; None if nothing. Of copies, only the first is sent."""
        if not self.contributes(source, self.members[matrix.owner]):
            return None
        section = self.section(source, matrix)
        return section if section is not None and section.block.owned else None

    def volume(self, batch: Sequence[int]) -> BatchVolume:
        """Count the elements of a batch on this rank."""
        matrices = self.matrices(batch)
        owned = [matrix for matrix in matrices if self.members[matrix.owner] == self.rank]
        return BatchVolume(
            sent=sum(_size(self.sent(matrix, self.rank)) for matrix in matrices),
            received=sum(matrix.elements for matrix in owned),
            returned=sum(_size(self.section(member, matrix)) for matrix in owned for member in self.members),
            results=sum(_size(self.section(self.rank, matrix)) for matrix in matrices),
            owned=tuple((matrix.rows, matrix.columns) for matrix in owned),
        )

    def flops(self) -> float:
        """FLOPs of the matrices that this rank owns; 0 if the optimizer updates every element on its own."""
        if self._spec.matrix_dtype is None:
            return 0.0
        volumes = (self.volume(batch) for batch in self.batches)
        return float(sum(self._spec.matrix_flops(*shape) for volume in volumes for shape in volume.owned))

    def message_bytes(self) -> int:
        """Bytes of the messages of this rank, as rehearsals count them; 0 for a single rank."""
        if len(self.members) == 1 or self._spec.matrix_dtype is None:
            return 0
        elements = sum(sum(self.volume(batch).message_elements()) for batch in self.batches)
        return elements * self._spec.matrix_dtype.itemsize

    def _layer(self, tensor_index: int, layer: int) -> dict[str, RowLayout]:
        """Return the layouts of the parameters of a layer on a tensor rank."""
        key = (tensor_index, layer)
        if key not in self._layouts:
            shard = ModelShard(tensor_index, self._step.layout.tensor, range(layer, layer + 1), False, False)
            self._layouts[key] = parameter_layouts(self._step.model, shard)
        return self._layouts[key]

    def _row_range(self, rank: int, rows: int) -> tuple[int, int]:
        """Return the first row of a parameter that a rank stores, and one past the last."""
        if not self._step.sharded:
            return 0, rows
        index, count = self._step.layout.state_shard(rank)
        size = -(-rows // count)
        first = min(index * size, rows)
        return first, min(first + size, rows)


def _size(section: MatrixWindow | None) -> int:
    return 0 if section is None else section.elements


def matrix_shapes(model: ModelConfig, layer: int) -> list[tuple[str, str, tuple[int, int]]]:
    """Return (parameter, canonical name, shape) of the hidden matrices of a layer."""
    layouts = parameter_layouts(model, ModelShard(0, 1, range(layer, layer + 1), False, False))
    return [
        (parameter, name, (shape[0], shape[1]))
        for parameter, layout in layouts.items()
        if layout.is_hidden_matrix
        for name, shape in layout.canonical_shapes.items()
    ]


@lru_cache(maxsize=256)
def _owners(config: OptimizerConfig, mode: str, shapes: tuple[tuple[int, int], ...], members: int) -> tuple[int, ...]:
    """Choose an owner for each matrix: the most expensive first, each for the member with the fewest FLOPs so far."""
    spec = optimizer_spec(config, mode)
    costs = [float(spec.matrix_flops(*shape)) for shape in shapes]
    loads, owners = [(0.0, member) for member in range(members)], [0] * len(shapes)  # a heap: sorted at first
    for index in sorted(range(len(shapes)), key=lambda index: (-costs[index], index)):
        load, owners[index] = loads[0]
        heapq.heapreplace(loads, (load + costs[index], owners[index]))
    return tuple(owners)
