"""Exchange of whole matrices: the ``WholeMatrices`` of an optimizer whose parameters are sharded.

    stored rows and columns --all-to-all--> whole matrices on their owners --function--> results
        --all-to-all--> stored rows and columns of the results

``stages/matrix_plan.py`` decides who owns what. Messages are bytes, so that every library can send every dtype. An
owner computes one matrix at a time, in its canonical shape: equal inputs give the same bits in every layout.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hlat.model import LocalParameter
from hlat.optim import MatrixFunction
from hlat.parallel.stages.matrix_plan import Matrix, MatrixPlan, MatrixWindow

Part = tuple[Matrix, MatrixWindow]
"""A matrix, and the rows and columns of it that a message has."""


class MatrixExchange:
    """Access to whole matrices that the ranks of a pipeline stage store together (``hlat.optim.WholeMatrices``).

    Args:
        plan: the plan of this rank.
        group: the members of the plan.
    """

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
        names = {each.name for each in parameters}
        (matrices,) = (batch for batch in self._matrices if names == {matrix.parameter for matrix in batch})
        local = {each.name: (each, tensor) for each, tensor in zip(parameters, tensors, strict=True)}
        example = tensors[0]

        def views(part: Part) -> list[torch.Tensor]:
            parameter, tensor = local[part[0].parameter]
            return parameter.row_views(part[1].block, tensor)

        owned = [matrix for matrix in matrices if matrix.owner == self._rank]
        to_owners = self._by_member(lambda owner: self._sent(matrices, owner, self._rank))
        from_ranks = self._by_member(lambda source: self._sent(matrices, self._rank, source))
        received = self._exchange(_pack(to_owners, views, example), to_owners, from_ranks)
        whole = {matrix.name: example.new_empty(matrix.rows, matrix.columns) for matrix in owned}
        _unpack(received, from_ranks, lambda part: [_window(whole[part[0].name], part[1])])
        del received
        for matrix in owned:
            whole[matrix.name] = function(matrix.name, whole[matrix.name])
        to_ranks = self._by_member(lambda member: self._stored(matrices, self._rank, member))
        from_owners = self._by_member(lambda owner: self._stored(matrices, owner, self._rank))
        returned = _pack(to_ranks, lambda part: [_window(whole[part[0].name], part[1])], example)
        whole.clear()
        _unpack(self._exchange(returned, to_ranks, from_owners), from_owners, views)

    def _by_member(self, parts: Callable[[int], list[Part]]) -> list[list[Part]]:
        return [parts(index) for index in range(len(self._plan.members))]

    def _sent(self, matrices: Sequence[Matrix], owner: int, source: int) -> list[Part]:
        """Return what one member sends to another, the owner."""
        rank = self._plan.members[source]
        return [
            (matrix, section)
            for matrix in matrices
            if matrix.owner == owner and (section := self._plan.sent(matrix, rank)) is not None
        ]

    def _stored(self, matrices: Sequence[Matrix], owner: int, member: int) -> list[Part]:
        """Return what a member stores of the matrices of an owner."""
        rank = self._plan.members[member]
        return [
            (matrix, section)
            for matrix in matrices
            if matrix.owner == owner and (section := self._plan.section(rank, matrix)) is not None
        ]

    def _exchange(
        self, sent: torch.Tensor, to_members: Sequence[list[Part]], from_members: Sequence[list[Part]]
    ) -> torch.Tensor:
        """Send each member its parts, and return the parts received, one member after the other."""
        received = sent.new_empty(sum(map(_elements, from_members)))
        size = sent.element_size()
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
    """Return the rows and columns of a whole matrix, as a view."""
    rows = whole.narrow(0, section.block.canonical_start, section.block.rows)
    return rows.narrow(1, section.first_column, section.columns)


def _pack(
    members: Sequence[list[Part]], views: Callable[[Part], list[torch.Tensor]], example: torch.Tensor
) -> torch.Tensor:
    """Copy parts into one flat tensor, in order."""
    packed = example.new_empty(sum(map(_elements, members)))
    _walk(packed, members, views, lambda flat, view: flat.view(view.shape).copy_(view))
    return packed


def _unpack(packed: torch.Tensor, members: Sequence[list[Part]], views: Callable[[Part], list[torch.Tensor]]) -> None:
    """Copy a flat tensor into parts, the inverse of ``_pack``."""
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
