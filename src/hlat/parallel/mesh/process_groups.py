"""The process groups of a rank, and the device mesh over them.

    layout, rank -> the groups this rank belongs to -> DeviceMesh (pp, dp, cp, tp)

A rank creates only the groups that it belongs to, and a group of the same ranks only once. So the number of groups of a
rank does not grow with the world size, nor does the time to create them, apart from joining the world. (If every rank
creates every group, the total is quadratic; HLAT had to patch that.)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hlat.config import ModelConfig
from hlat.model import kv_replication
from hlat.parallel.mesh.mesh_layout import AXES, Layout
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import device_group
from hlat.runtime.errors import LaunchError


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
            self._groups[ranks] = device_group(ranks)
        return self._groups[ranks]


def rank_groups(
    layout: Layout, rank: int, model: ModelConfig, whole_matrices: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the ranks of every process group that a rank belongs to, by purpose, in the order of their creation.

    Args:
        layout: layout of all ranks.
        rank: the rank.
        model: decides how many tensor-parallel ranks share a kv head, and if the embedding is tied.
        whole_matrices: True if the optimizer updates matrices as a whole.
    """
    groups: dict[str, tuple[int, ...]] = {axis: layout.group(rank, axis) for axis in AXES}
    groups["gradients"] = layout.group(rank, "dp", "cp")
    if layout.zero and len(layout.state_shards(rank)) > 1:
        groups |= {"replicas": layout.state_replicas(rank), "shards": layout.state_shards(rank)}
    groups["kv"] = layout.tensor_subgroup(rank, kv_replication(model, layout.tensor))
    if whole_matrices:
        groups["matrices"] = layout.group(rank, "dp", "cp", "tp")
    embedding = layout.embedding_ranks(rank)
    if model.tie_embeddings and layout.pipeline > 1 and rank in embedding:
        groups["embedding"] = embedding
    return groups


def group_problems(groups: Mapping[str, tuple[int, ...]], device: torch.device) -> list[str]:
    """Return a sentence for each set of ranks that cannot form a process group on a device.

    Args:
        groups: result of ``rank_groups``.
        device: the device.
    """
    refusals = dict.fromkeys(backend_of(device).group_refusal(ranks) for ranks in groups.values() if len(ranks) > 1)
    return [
        f"parallel: {refusal}. Use other degrees, or model.tie_embeddings=false." for refusal in refusals if refusal
    ]


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

    Raises:
        LaunchError: the device cannot form such groups.
    """
    if layout.world == 1:
        return SINGLE_PROCESS
    ranks = rank_groups(layout, rank, model, whole_matrices)
    if problems := group_problems(ranks, device):
        raise LaunchError("\n".join(problems))
    create = _GroupFactory(layout.world)

    def unless_single(purpose: str) -> ProcessGroup | None:
        return create(ranks[purpose]) if len(ranks.get(purpose, ())) > 1 else None

    # All ranks create groups in the same order, since the members of a group wait for each other. And torch names a
    # group by the number of groups its members created before, so a group of only some ranks (embedding) comes last.
    axes = [create(ranks[axis]) for axis in AXES]
    grid = torch.arange(layout.world).view(layout.sizes)
    mesh = DeviceMesh.from_group(axes, device.type, mesh=grid, mesh_dim_names=AXES)
    pipeline, data, context, tensor = (
        mesh.get_group(axis) if size > 1 else None for axis, size in zip(AXES, layout.sizes, strict=True)
    )
    return ProcessGroups(
        mesh=mesh,
        pipeline=pipeline,
        tensor=tensor,
        context=context,
        data=data,
        gradients=unless_single("gradients"),
        shard_mesh=_build_shard_mesh(layout, ranks, create, device) if "shards" in ranks else None,
        kv=unless_single("kv"),
        matrices=unless_single("matrices"),
        embedding=unless_single("embedding"),
    )


def _build_shard_mesh(
    layout: Layout, ranks: Mapping[str, tuple[int, ...]], create: _GroupFactory, device: torch.device
) -> DeviceMesh:
    shards, replicas = ranks["shards"], ranks["replicas"]
    if len(replicas) == 1:
        return DeviceMesh.from_group(create(shards), device.type, mesh_dim_names=("shards",))
    grid = torch.tensor([layout.state_shards(replica) for replica in replicas])
    return DeviceMesh.from_group(
        [create(replicas), create(shards)], device.type, mesh=grid, mesh_dim_names=("replicas", "shards")
    )
