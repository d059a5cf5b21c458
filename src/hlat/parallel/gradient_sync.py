"""Gradient reductions of replicated parameters after backward, and the rows that a rank counts in a norm.

    replicated parameters whose ranks computed different terms of the gradient -> sum over those ranks
        norm weights with sequence parallelism       each tensor rank has the term of its shard of the sequence
        q and k norms with tensor parallelism        each tensor rank has the term of its heads
        k and v rows of a replicated kv head         each copy has the term of its query heads
        a tied embedding on two pipeline stages      one has the term of the lookup, the other that of the head

The description of the architecture names these ranks for each tensor (``hlat.model.spec``). An all-reduce gives every
copy the same bits, so copies that start equal stay equal. It runs once per step, not per micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hlat.model import GradientSum, LocalParameter
from hlat.parallel.mesh.collectives import all_reduce_together
from hlat.parallel.mesh.mesh_layout import Layout
from hlat.parallel.mesh.process_groups import ProcessGroups


@dataclass(frozen=True)
class ReplicatedGradients:
    """Parameters of a rank whose gradients must be summed over several ranks.

    Attributes:
        over_tensor: parameters to reduce over the tensor group.
        over_kv: parameters with k or v rows to reduce over the ranks that share a kv head.
        tied: this rank's copies of a tied embedding.
        groups: process groups of the rank.
    """

    over_tensor: Sequence[LocalParameter]
    over_kv: Sequence[LocalParameter]
    tied: Sequence[LocalParameter]
    groups: ProcessGroups

    @classmethod
    def of(cls, parameters: Sequence[LocalParameter], layout: Layout, groups: ProcessGroups) -> "ReplicatedGradients":
        """Select the parameters to reduce from all local parameters of a rank."""
        partial = {GradientSum.TENSOR, *([GradientSum.SEQUENCE] if layout.sequence_parallel else [])}
        over_tensor = [each for each in parameters if groups.tensor is not None and partial & _sums(each)]
        over_kv = [each for each in parameters if groups.kv is not None and GradientSum.KEY_COPIES in _sums(each)]
        tied = [each for each in parameters if GradientSum.TIED in _sums(each)]
        is_tied = groups.embedding is not None or len(tied) > 1
        return cls(over_tensor, over_kv, tied if is_tied else [], groups)

    def all_reduce(self) -> None:
        """Sum the gradients of all copies, in place."""
        if self.over_tensor and self.groups.tensor is not None:
            all_reduce_together(list(_gradients(self.over_tensor)), self.groups.tensor)
        if self.over_kv and self.groups.kv is not None:
            rows = [
                view
                for parameter in self.over_kv
                for block in parameter.row_blocks()
                if block.tensor.gradient_sum is GradientSum.KEY_COPIES and parameter.gradient is not None
                for view in parameter.row_views(block, parameter.gradient)
            ]
            all_reduce_together(rows, self.groups.kv)
        tied = list(_gradients(self.tied))
        if len(tied) == 2:  # this rank has both the embedding and the head
            tied[0].add_(tied[1])
            tied[1].copy_(tied[0])
        elif tied and self.groups.embedding is not None:
            all_reduce_together(tied, self.groups.embedding)


def _sums(parameter: LocalParameter) -> set[GradientSum]:
    return {tensor.gradient_sum for tensor in parameter.layout.tensors}


def _gradients(parameters: Sequence[LocalParameter]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        if parameter.gradient is not None:
            yield parameter.gradient


def owned_rows(parameter: LocalParameter, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return views of the rows of ``tensor`` (local shape of the parameter) that this rank owns and counts in norms."""
    if not parameter.owned or tensor.numel() == 0:
        return []
    if parameter.layout.all_owned:
        return [tensor]
    return [view for block in parameter.row_blocks() if block.owned for view in parameter.row_views(block, tensor)]


def sum_over_world(values: torch.Tensor, world: int) -> torch.Tensor:
    """Sum a tensor over all ranks, in place."""
    if world > 1:
        dist.all_reduce(values)
    return values
