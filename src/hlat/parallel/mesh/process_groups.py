"""The process groups of a rank, and the device mesh over them.

    layout, rank -> the groups this rank belongs to -> DeviceMesh (pp, dp, cp, tp)

A rank creates only the groups that it belongs to, and a group of the same ranks only once. So the number of groups of a
rank does not grow with the world size, nor does the time to create them, apart from joining the world. (If every rank
creates every group, the total is quadratic; HLAT had to patch that.)
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
    """Process groups of a rank; None for a group of one rank.

    Attributes:
        mesh: all ranks, on the axes pp, dp, cp, tp.
        pipeline, tensor, context, data: this rank's group on each axis.
        gradients: the ranks with the same parameters and other tokens (dp x cp).
        shard_mesh: the mesh over which FSDP2 shards: (shards,) or, with several replicas, (replicas, shards).
        kv: the tensor-parallel ranks with a copy of the same kv head.
        embedding: the ranks of first and last stage, which share a tied embedding.
        matrices: the ranks of this pipeline stage, if they exchange whole matrices for the optimizer.
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
    matrices: ProcessGroup | None = None


SINGLE_PROCESS = ProcessGroups(None, None, None, None, None, None, None, None, None)


class _GroupFactory:
    """Create each process group once, by its ranks."""

    def __init__(self, world: int) -> None:
        assert dist.group.WORLD is not None, "the default process group was initialised before"
        self._groups: dict[tuple[int, ...], ProcessGroup] = {tuple(range(world)): dist.group.WORLD}

    def __call__(self, ranks: tuple[int, ...]) -> ProcessGroup:
        if ranks not in self._groups:
            group = call_interruptibly(lambda: dist.new_group(list(ranks), use_local_synchronization=True))
            assert isinstance(group, ProcessGroup), "this rank is a member"
            self._groups[ranks] = group
        return self._groups[ranks]

    def unless_single(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        return self(ranks) if len(ranks) > 1 else None


def create_process_groups(
    layout: Layout, rank: int, model: ModelConfig, device: torch.device, whole_matrices: bool = False
) -> ProcessGroups:
    """Create the process groups of this rank. All ranks have to call it together, before any other communication.

    Args:
        layout: layout of all ranks.
        rank: this rank.
        model: decides how many tensor-parallel ranks share a kv head, and if the embedding is tied.
        device: decides the backend of the meshes.
        whole_matrices: True if the optimizer updates matrices as a whole.
    """
    if layout.world == 1:
        return SINGLE_PROCESS
    create = _GroupFactory(layout.world)
    # All ranks create groups in the same order, since the members of a group wait for each other. And torch names a
    # group by the number of groups its members created before, so a group of only some ranks (embedding) comes last.
    axes = [create(layout.group(rank, axis)) for axis in AXES]
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
        gradients=create.unless_single(layout.group(rank, "dp", "cp")),
        shard_mesh=_build_shard_mesh(layout, rank, create, device) if layout.zero else None,
        kv=create.unless_single(layout.tensor_subgroup(rank, kv_replication(model, layout.tensor))),
        matrices=create.unless_single(layout.group(rank, "dp", "cp", "tp")) if whole_matrices else None,
        embedding=create.unless_single(embedding_ranks) if tied and rank in embedding_ranks else None,
    )


def _build_shard_mesh(layout: Layout, rank: int, create: _GroupFactory, device: torch.device) -> DeviceMesh | None:
    shards, replicas = layout.state_shards(rank), layout.state_replicas(rank)
    if len(shards) == 1:
        return None
    if len(replicas) == 1:
        return DeviceMesh.from_group(create(shards), device.type, mesh_dim_names=("shards",))
    grid = torch.tensor([layout.state_shards(replica) for replica in replicas])
    return DeviceMesh.from_group(
        [create(replicas), create(shards)], device.type, mesh=grid, mesh_dim_names=("replicas", "shards")
    )
