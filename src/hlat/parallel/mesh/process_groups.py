"""The process groups of a rank, and the device mesh over them.

    layout, rank -> the groups this rank belongs to -> DeviceMesh (pp, dp, cp, tp)

A rank creates only the groups that it is in, and groups of the same ranks once: their number does not grow with the
world, so neither does the time it takes beyond what joining the world costs. (Every rank creating every group is
quadratic in all; HLAT had to patch it.)
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hlat.config.sections import ModelConfig
from hlat.model import kv_replication
from hlat.parallel.mesh.mesh_layout import AXES, Layout
from hlat.runtime.distributed import call_interruptibly


@dataclass(frozen=True)
class ProcessGroups:
    """What a rank talks over; None where it would talk to itself.

    Attributes:
        mesh: all ranks, on the axes pp, dp, cp, tp.
        pipeline, tensor, context, data: this rank's group on each axis.
        gradients: everyone who holds the same parameters and sees other tokens (dp x cp).
        shards: the mesh over which FSDP2 shards: (shards,) or, with several replicas, (replicas, shards).
        kv: the tensor-parallel ranks that hold the same kv head.
        ends: first and last stage, which share a tied embedding.
    """

    mesh: DeviceMesh | None
    pipeline: ProcessGroup | None
    tensor: ProcessGroup | None
    context: ProcessGroup | None
    data: ProcessGroup | None
    gradients: ProcessGroup | None
    shard_mesh: DeviceMesh | None
    kv: ProcessGroup | None
    embedding: ProcessGroup | None


ALONE = ProcessGroups(None, None, None, None, None, None, None, None, None)


class _Maker:
    """Makes each group once."""

    def __init__(self, world: int) -> None:
        assert dist.group.WORLD is not None, "the default process group exists"
        self._known: dict[tuple[int, ...], ProcessGroup] = {tuple(range(world)): dist.group.WORLD}

    def __call__(self, ranks: tuple[int, ...]) -> ProcessGroup:
        if ranks not in self._known:
            group = call_interruptibly(lambda: dist.new_group(list(ranks), use_local_synchronization=True))
            assert isinstance(group, ProcessGroup), "this rank is a member"
            self._known[ranks] = group
        return self._known[ranks]

    def unless_alone(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        return self(ranks) if len(ranks) > 1 else None


def create_process_groups(layout: Layout, rank: int, model: ModelConfig, device: torch.device) -> ProcessGroups:
    """Create the groups of this rank. All ranks call it together, before anything else is sent.

    Args:
        layout: of all ranks.
        rank: this one.
        model: says how many tensor-parallel ranks share a kv head, and whether the embedding is tied.
        device: decides the backend of the meshes.
    """
    if layout.world == 1:
        return ALONE
    make = _Maker(layout.world)
    # Every rank asks in the same order: a group's members wait for each other when it is made. And torch names a group
    # by how many its members have made before, so what only some ranks make (``ends``) comes last.
    axes = [make(layout.group(rank, axis)) for axis in AXES]
    grid = torch.arange(layout.world).view(layout.sizes)
    mesh = DeviceMesh.from_group(axes, device.type, mesh=grid, mesh_dim_names=AXES)
    pipeline, data, context, tensor = (
        mesh.get_group(axis) if size > 1 else None for axis, size in zip(AXES, layout.sizes, strict=True)
    )
    tied = model.tie_embeddings and layout.pipeline > 1
    embedding_ranks = layout.embedding_ranks(rank)
    return ProcessGroups(
        mesh=mesh,
        pipeline=pipeline,
        tensor=tensor,
        context=context,
        data=data,
        gradients=make.unless_alone(layout.group(rank, "dp", "cp")),
        shard_mesh=_build_shard_mesh(layout, rank, make, device) if layout.zero else None,
        kv=make.unless_alone(layout.tensor_subgroup(rank, kv_replication(model, layout.tensor))),
        embedding=make.unless_alone(embedding_ranks) if tied and rank in embedding_ranks else None,
    )


def _build_shard_mesh(layout: Layout, rank: int, make: _Maker, device: torch.device) -> DeviceMesh | None:
    shards, replicas = layout.state_shards(rank), layout.state_replicas(rank)
    if len(shards) == 1:
        return None
    if len(replicas) == 1:
        return DeviceMesh.from_group(make(shards), device.type, mesh_dim_names=("shards",))
    grid = torch.tensor([layout.state_shards(replica) for replica in replicas])
    return DeviceMesh.from_group(
        [make(replicas), make(shards)], device.type, mesh=grid, mesh_dim_names=("replicas", "shards")
    )
