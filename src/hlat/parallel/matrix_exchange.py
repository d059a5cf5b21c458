"""Exchange of whole matrices, for optimizers whose parameters are sharded: the plan, and the messages.

    step shape, rank -> layers in batches -> owner of each matrix -> rows and columns sent to owners: ``MatrixPlan``
    stored rows and columns --all-to-all--> whole matrices on their owners --function--> results
        --all-to-all--> stored rows and columns of the results: ``MatrixExchange``

An optimizer that updates hidden matrices as a whole (``OptimizerSpec.matrix_dtype``) needs their rows and columns from
all ranks that shard them (tensor parallelism, ZeRO). The ranks of a pipeline stage share the work: each matrix has one
owner among them, chosen so that their FLOPs are about equal. An owner gathers the matrix from its own replica of the
state, and returns the result to every rank that stores rows of it. So no matrix is computed twice, and copies (of
replicas, of kv heads) receive the same bits. Layers are exchanged in batches, of as many matrices as ranks unless a
rank would store too much of them.

The plan follows from shapes only; plans and rehearsals count by it. Messages are bytes, so that every library can send
every dtype. An owner computes one matrix at a time, in its canonical shape: equal inputs give the same bits in every
layout.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hlat.config import ModelConfig, OptimizerConfig
from hlat.model import LocalParameter, ModelShard, RowBlock, RowLayout, parameter_layouts
from hlat.optim import MatrixFunction, OptimizerSpec, optimizer_spec
from hlat.parallel.layout import StepShape

_MOST_ELEMENTS = 1 << 28  # stored by a rank of the layers of a batch, unless a single layer has more


@dataclass(frozen=True)
class Matrix:
    """A canonical hidden matrix, and the member of the exchange that owns it."""

    layer: int
    parameter: str  # name of the parameter that has it
    name: str  # canonical
    rows: int
    columns: int
    owner: int  # index of its owner in the members of the exchange

    @property
    def elements(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class MatrixWindow:
    """Rows and columns of a matrix that a rank stores."""

    block: RowBlock  # the rows, and where they are in the parameter
    first_column: int
    columns: int

    @property
    def elements(self) -> int:
        return self.block.rows * self.columns


class MatrixPlan:
    """Exchange of whole matrices between the ranks of a pipeline stage, for the layers (ascending) of a rank.

    All ranks with the same pipeline index have the same plan. ``members`` are the ranks of the exchange, ascending;
    ``batches`` are layers that are exchanged together.
    """

    def __init__(self, step: StepShape, rank: int, layers: Sequence[int]) -> None:
        self._step, self.rank = step, rank
        self._spec: OptimizerSpec[Any] = optimizer_spec(step.optimizer, step.mode)
        self.members = step.layout.group(rank, "dp", "cp", "tp")
        shapes = [shape for *_, shape in matrix_shapes(step.model, 0)]
        stored = sum(map(prod, shapes)) // (step.layout.tensor * step.shards)
        # As many matrices as ranks, so that each owns one, unless a rank would store too much of them.
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

    def section(self, matrix: Matrix, rank: int) -> MatrixWindow | None:
        """Return the rows and columns of a matrix that a rank stores; None if it has none."""
        layout = self._layer(self._step.layout.coordinates(rank).tp, matrix.layer)[matrix.parameter]
        rows = self._step.shard_rows(rank, layout.rows)
        for block in layout.row_blocks(rows.start, rows.stop):
            if block.name == matrix.name:
                return MatrixWindow(block, layout.first_column, layout.columns[0])
        return None

    def sent(self, matrix: Matrix, source: int) -> MatrixWindow | None:
        """Return what a rank sends to the owner of a matrix; None if nothing."""
        # An owner gathers from its own replica of the state.
        layout, sharded, owner = self._step.layout, self._step.sharded, self.members[matrix.owner]
        if layout.state_replica(source, sharded) != layout.state_replica(owner, sharded):
            return None
        # Of several copies of a section only the first is sent.
        section = self.section(matrix, source)
        return section if section is not None and section.block.owned else None

    def _owned(self, matrices: Sequence[Matrix]) -> list[Matrix]:
        return [matrix for matrix in matrices if self.members[matrix.owner] == self.rank]

    def _message_elements(self, matrices: Sequence[Matrix]) -> int:
        """Count the elements of both messages of a batch, each as the larger of what is sent and received."""
        owned = self._owned(matrices)
        sent = sum(_size(self.sent(matrix, self.rank)) for matrix in matrices)
        returned = sum(_size(self.section(matrix, member)) for matrix in owned for member in self.members)
        results = sum(_size(self.section(matrix, self.rank)) for matrix in matrices)
        return max(sent, sum(matrix.elements for matrix in owned)) + max(returned, results)

    def flops(self) -> float:
        """FLOPs of the matrices that this rank owns; 0 if the optimizer updates every element on its own."""
        if self._spec.matrix_dtype is None:
            return 0.0
        owned = (matrix for batch in self.batches for matrix in self._owned(self.matrices(batch)))
        return float(sum(self._spec.matrix_flops(matrix.rows, matrix.columns) for matrix in owned))

    def message_bytes(self) -> int:
        """Bytes of the messages of this rank, as rehearsals count them; 0 for a single rank."""
        if len(self.members) == 1 or self._spec.matrix_dtype is None:
            return 0
        elements = sum(self._message_elements(self.matrices(batch)) for batch in self.batches)
        return elements * self._spec.matrix_dtype.itemsize

    def _layer(self, tensor_index: int, layer: int) -> dict[str, RowLayout]:
        key = (tensor_index, layer)
        if key not in self._layouts:
            shard = ModelShard(tensor_index, self._step.layout.tensor, range(layer, layer + 1), False, False)
            self._layouts[key] = parameter_layouts(self._step.model, shard)
        return self._layouts[key]


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


Part = tuple[Matrix, MatrixWindow]  # a matrix, and the rows and columns of it that a message has


class MatrixExchange:
    """Access to whole matrices that the ranks of a pipeline stage store together (``hlat.optim.WholeMatrices``)."""

    def __init__(self, plan: MatrixPlan, group: ProcessGroup) -> None:
        self._plan, self._group = plan, group
        self._rank = plan.members.index(plan.rank)
        self._matrices = [plan.matrices(batch) for batch in plan.batches]
        self._shapes = {matrix.name: (matrix.rows, matrix.columns) for batch in self._matrices for matrix in batch}

    def batches(self, parameters: Sequence[LocalParameter]) -> Iterator[Sequence[LocalParameter]]:
        """Yield the parameters of one batch of layers at a time."""
        by_name = {each.name: each for each in parameters}
        for matrices in self._matrices:
            yield [by_name[name] for name in dict.fromkeys(matrix.parameter for matrix in matrices)]

    def shapes(self, parameter: LocalParameter) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole canonical matrices of a parameter."""
        return {name: self._shapes[name] for name in parameter.layout.canonical_shapes}

    def transform(
        self, parameters: Sequence[LocalParameter], tensors: Sequence[torch.Tensor], function: MatrixFunction
    ) -> None:
        """Apply a function to the whole matrices of a batch, in place. Collective."""
        plan, names = self._plan, {each.name for each in parameters}
        (matrices,) = (batch for batch in self._matrices if names == {matrix.parameter for matrix in batch})
        local = {each.name: (each, tensor) for each, tensor in zip(parameters, tensors, strict=True)}
        example = tensors[0]

        def views(part: Part) -> list[torch.Tensor]:
            parameter, tensor = local[part[0].parameter]
            return parameter.row_views(part[1].block, tensor)

        here, members = self._rank, range(len(plan.members))
        owned = [matrix for matrix in matrices if matrix.owner == here]
        to_owners = [self._parts(matrices, owner, here, plan.sent) for owner in members]
        from_ranks = [self._parts(matrices, here, source, plan.sent) for source in members]
        received = self._exchange(_pack(to_owners, views, example), to_owners, from_ranks)
        whole = {matrix.name: example.new_empty(matrix.rows, matrix.columns) for matrix in owned}
        _unpack(received, from_ranks, lambda part: [_window(whole[part[0].name], part[1])])
        # Messages and matrices have the size of the batch each: none lives longer than it is needed.
        del received
        for matrix in owned:
            whole[matrix.name] = function(matrix.name, whole[matrix.name])
        to_ranks = [self._parts(matrices, here, member, plan.section) for member in members]
        from_owners = [self._parts(matrices, owner, here, plan.section) for owner in members]
        returned = _pack(to_ranks, lambda part: [_window(whole[part[0].name], part[1])], example)
        whole.clear()
        _unpack(self._exchange(returned, to_ranks, from_owners), from_owners, views)

    def _parts(
        self,
        matrices: Sequence[Matrix],
        owner: int,
        member: int,
        stored: Callable[[Matrix, int], MatrixWindow | None],
    ) -> list[Part]:
        """Pair the matrices of an owner with what a member stores of them, or sends of it."""
        rank = self._plan.members[member]
        owned = (matrix for matrix in matrices if matrix.owner == owner)
        return [(matrix, window) for matrix in owned if (window := stored(matrix, rank)) is not None]

    def _exchange(
        self, sent: torch.Tensor, to_members: Sequence[list[Part]], from_members: Sequence[list[Part]]
    ) -> torch.Tensor:
        """Send each member its parts, and return the parts received, one member after the other."""
        received = sent.new_empty(sum(map(_elements, from_members)))
        size = sent.element_size()
        # As bytes: every library can send them, whatever the dtype.
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [size * _elements(parts) for parts in from_members],
            [size * _elements(parts) for parts in to_members],
            group=self._group,
        )
        return received


def _elements(parts: Sequence[Part]) -> int:
    return sum(section.elements for _, section in parts)


def _window(whole: torch.Tensor, section: MatrixWindow) -> torch.Tensor:
    rows = whole.narrow(0, section.block.canonical_start, section.block.rows)
    return rows.narrow(1, section.first_column, section.columns)


def _pack(
    members: Sequence[list[Part]], views: Callable[[Part], list[torch.Tensor]], example: torch.Tensor
) -> torch.Tensor:
    packed = example.new_empty(sum(map(_elements, members)))
    _walk(packed, members, views, lambda flat, view: flat.view(view.shape).copy_(view))
    return packed


def _unpack(packed: torch.Tensor, members: Sequence[list[Part]], views: Callable[[Part], list[torch.Tensor]]) -> None:
    _walk(packed, members, views, lambda flat, view: view.copy_(flat.view(view.shape)))


def _walk(
    packed: torch.Tensor,
    members: Sequence[list[Part]],
    views: Callable[[Part], list[torch.Tensor]],
    copy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Call ``copy`` with each view of each part and its range of a flat tensor."""
    start = 0
    for parts in members:
        for part in parts:
            for view in views(part):
                copy(packed[start : start + view.numel()], view)
                start += view.numel()
