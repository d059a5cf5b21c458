"""Gradient reductions that remain after backward, and the rows that a rank counts in a norm.

    copies of a parameter on several ranks that saw different parts of the computation: sum over those ranks
        norm weights under sequence parallelism      each tensor rank saw its shard of the sequence
        q and k norms under tensor parallelism       each tensor rank saw its heads
        k and v rows of a replicated kv head         each copy saw its query heads
        a tied embedding on two pipeline stages      one saw the lookup, the other the head

A sum over ranks gives every copy the same bits, so copies that start equal stay equal. Once per step, not per
micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hlat.model import LocalParameter
from hlat.parallel.mesh import Layout, ProcessGroups, all_reduce_together

_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
_KV = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")


@dataclass(frozen=True)
class ReplicatedGradients:
    """Which gradients of a rank have copies elsewhere that have to be added up."""

    over_tensor: Sequence[LocalParameter]
    over_kv: Sequence[LocalParameter]
    tied: Sequence[LocalParameter]  # this rank's copies of a tied embedding
    groups: ProcessGroups

    @classmethod
    def of(cls, held: Sequence[LocalParameter], layout: Layout, groups: ProcessGroups) -> "ReplicatedGradients":
        """Sort out a rank's parameters."""

        def partial(name: str) -> bool:
            is_norm = name.endswith("norm.weight")
            return name.endswith(_HEAD_NORMS) or (is_norm and layout.sequence_parallel)

        over_tensor = [one for one in held if groups.tensor is not None and partial(one.name)]
        over_kv = [
            one for one in held if groups.kv is not None and any(p.name.endswith(_KV) for p in one.layout.tensors)
        ]
        ends = [one for one in held if one.layout.tensors[0].name == "model.embed_tokens.weight"]
        is_tied = groups.embedding is not None or len(ends) > 1
        return cls(over_tensor, over_kv, ends if is_tied else [], groups)

    def all_reduce(self) -> None:
        """Sum the gradients of all copies, in place."""
        if self.over_tensor and self.groups.tensor is not None:
            all_reduce_together(list(_gradients(self.over_tensor)), self.groups.tensor)
        if self.over_kv and self.groups.kv is not None:
            rows = [
                view
                for one in self.over_kv
                for piece in one.row_blocks()
                if piece.name.endswith(_KV) and one.gradient is not None
                for view in one.row_views(piece, one.gradient)
            ]
            all_reduce_together(rows, self.groups.kv)
        tied = list(_gradients(self.tied))
        if len(tied) == 2:  # both ends of the pipeline are here
            tied[0].add_(tied[1])
            tied[1].copy_(tied[0])
        elif tied and self.groups.embedding is not None:
            all_reduce_together(tied, self.groups.embedding)


def _gradients(held: Sequence[LocalParameter]) -> Iterator[torch.Tensor]:
    for one in held:
        if one.gradient is not None:
            yield one.gradient


def owned_rows(one: LocalParameter, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The rows, of a tensor of the parameter's local shape, that no other rank counts."""
    if not one.owned or tensor.numel() == 0:
        return []
    if all(part.owned for part in one.layout.tensors):
        return [tensor]
    return [view for piece in one.row_blocks() if piece.owned for view in one.row_views(piece, tensor)]


def sum_over_world(values: torch.Tensor, world: int) -> torch.Tensor:
    """The sum of a tensor over all ranks, in place."""
    if world > 1:
        dist.all_reduce(values)
    return values
