"""The process groups of a rank, the device mesh of its shards, and the collectives that they run.

    layout, rank -> the groups this rank belongs to, of the axes pp, dp, cp, tp -> DeviceMesh of FSDP2's shards
    tensors, group -> all-gather, reduce-scatter under one name in all torch versions | all-reduce in buckets
    groups --try_groups, small collectives with known results--> nothing, or a LaunchError: group and operation

A rank creates only the groups that it belongs to, and a group of the same ranks only once. So the number of groups of a
rank does not grow with the world size, nor does the time to create them, apart from joining the world. (If every rank
creates every group, the total is quadratic; HLAT had to patch that.)

Releases of a library may differ in what a group of a device can do. A collective may also return without an error and
have done nothing. So groups are tried before training, and every result is compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hlat.config import ModelConfig
from hlat.model import kv_replication
from hlat.parallel.layout import AXES, Layout
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import device_group
from hlat.runtime.errors import LaunchError, first_line
from hlat.runtime.terminal import TABLE_ROWS, listed


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups of a rank; None for a group of one rank."""

    pipeline: ProcessGroup | None
    tensor: ProcessGroup | None
    context: ProcessGroup | None
    data: ProcessGroup | None
    gradients: ProcessGroup | None  # the ranks with the same parameters and other tokens (dp x cp)
    shard_mesh: DeviceMesh | None  # over which FSDP2 shards: (shards,) or, with several replicas, (replicas, shards)
    kv: ProcessGroup | None  # the tensor-parallel ranks with a copy of the same kv head
    embedding: ProcessGroup | None  # the ranks of first and last stage, which share a tied embedding
    # The ranks of this pipeline stage, if they exchange whole matrices for the optimizer
    matrices: ProcessGroup | None = None


SINGLE_PROCESS = ProcessGroups(None, None, None, None, None, None, None, None)


def rank_groups(
    layout: Layout, rank: int, model: ModelConfig, whole_matrices: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the ranks of every process group that a rank belongs to, by purpose, in the order of their creation.

    ``whole_matrices``: the optimizer updates matrices as a whole.
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
    """Return a sentence for each set of ranks (of ``rank_groups``) that cannot form a process group on a device."""
    refusals = dict.fromkeys(backend_of(device).group_refusal(ranks) for ranks in groups.values() if len(ranks) > 1)
    return [
        f"parallel: {refusal}. Use other degrees, or model.tie_embeddings=false." for refusal in refusals if refusal
    ]


def create_process_groups(
    layout: Layout, rank: int, model: ModelConfig, device: torch.device, whole_matrices: bool = False
) -> ProcessGroups:
    """Create the process groups of this rank. All ranks have to call it together, before any other communication.

    The arguments are those of ``rank_groups``; the device decides the backend of the meshes.

    LaunchError: the device cannot form such groups.
    """
    if layout.world == 1:
        return SINGLE_PROCESS
    ranks = rank_groups(layout, rank, model, whole_matrices)
    if problems := group_problems(ranks, device):
        raise LaunchError("\n".join(problems))
    assert dist.group.WORLD is not None, "the default process group was initialised before"
    known: dict[tuple[int, ...], ProcessGroup] = {tuple(range(layout.world)): dist.group.WORLD}

    def create(members: tuple[int, ...]) -> ProcessGroup:
        if members not in known:
            known[members] = device_group(members)
        return known[members]

    def unless_single(purpose: str) -> ProcessGroup | None:
        return create(ranks[purpose]) if len(ranks.get(purpose, ())) > 1 else None

    # All ranks create groups in the same order, since the members of a group wait for each other. And torch names a
    # group by the number of groups its members created before, so a group of only some ranks (embedding) comes last.
    pipeline, data, context, tensor = map(unless_single, AXES)
    return ProcessGroups(
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
    layout: Layout,
    ranks: Mapping[str, tuple[int, ...]],
    create: Callable[[tuple[int, ...]], ProcessGroup],
    device: torch.device,
) -> DeviceMesh:
    shards, replicas = ranks["shards"], ranks["replicas"]
    if len(replicas) == 1:
        return DeviceMesh.from_group(create(shards), device.type, mesh_dim_names=("shards",))
    grid = torch.tensor([layout.state_shards(replica) for replica in replicas])
    return DeviceMesh.from_group(
        [create(replicas), create(shards)], device.type, mesh=grid, mesh_dim_names=("replicas", "shards")
    )


BUCKET_BYTES = 64 << 20  # largest size of a bucket of tensors that are sent together; a larger tensor is sent alone

# called all_gather_into_tensor and reduce_scatter_tensor up to torch 2.12
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Collective = Callable[[torch.Tensor, ProcessGroup], torch.Tensor]


def all_gather(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All-gather (...) of every rank into (ranks, ...) on every rank."""
    x = x.contiguous()
    out_R = x.new_empty((group.size(), *x.shape))
    _all_gather(out_R.view(-1), x.view(-1), group=group)
    return out_R


def reduce_scatter(terms_R: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Sum (ranks, ...) over all ranks, and return entry i of the sum, (...), on rank i."""
    terms_R = terms_R.contiguous()
    out = torch.empty_like(terms_R[0])
    _reduce_scatter(out.view(-1), terms_R.view(-1), group=group)
    return out


def differentiable(name: str, forward: Collective, backward: Collective) -> Collective:
    """Return a collective operation with autograd; ``backward`` makes of a gradient that of the input."""

    def of_input(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return forward(x, group)

    @once_differentiable
    def of_gradient(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return backward(grads[0], ctx.group), None

    # Named when it is created: torch then names the node of the backward pass after it, which profiles show.
    methods = {"forward": staticmethod(of_input), "backward": staticmethod(of_gradient)}
    function: Any = type(name, (torch.autograd.Function,), methods)

    def exchange(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        out: torch.Tensor = function.apply(x, group)
        return out

    return exchange


def all_reduce_together(tensors: Sequence[torch.Tensor], group: ProcessGroup) -> None:
    """Sum each tensor over a group, in place; tensors are sent in buckets."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(flat, group=group)
        sums = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(
            bucket, [flat_sum.view(tensor.shape) for flat_sum, tensor in zip(sums, bucket, strict=True)]
        )


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Buckets of about ``BUCKET_BYTES`` and a single dtype."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


_TRIED_DTYPES = (torch.float32, torch.bfloat16, torch.int32)
_ADVICE = "Use a layout without it, run.device=cpu, or another release of the library."


def try_groups(groups: ProcessGroups, device: torch.device) -> None:
    """Try the process groups of this rank with a few bytes. Collective; LaunchError: an operation fails or is wrong."""
    for name, group in _named(groups):
        for dtype in _TRIED_DTYPES:
            _try_operation(name, f"all-reduce of {dtype}", group, partial(_try_all_reduce, group, dtype, device))
        _try_operation(name, "all-gather", group, partial(_try_all_gather, group, device))
        _try_operation(name, "reduce-scatter", group, partial(_try_reduce_scatter, group, device))
    if groups.pipeline is not None:
        _try_operation("pipeline", "send and receive", groups.pipeline, partial(_try_ring, groups.pipeline, device))


def _named(groups: ProcessGroups) -> Iterator[tuple[str, ProcessGroup]]:
    found: dict[int, tuple[str, ProcessGroup]] = {}
    for name in ("pipeline", "data", "context", "tensor", "gradients", "kv", "embedding"):
        if (group := getattr(groups, name)) is not None:
            found.setdefault(id(group), (name, group))
    yield from found.values()


def _try_operation(
    name: str, operation: str, group: ProcessGroup, trial: Callable[[], tuple[list[float], list[float]]]
) -> None:
    ranks = listed(dist.get_process_group_ranks(group), TABLE_ROWS)
    try:
        # A collective may return without an error and have done nothing, so results are compared.
        found, expected = trial()
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        reason = first_line(error) or type(error).__name__
        raise LaunchError(
            f"{operation} does not work in the {name} group of ranks {ranks}: {reason}. {_ADVICE}"
        ) from error
    if found != expected:
        message = (
            f"{operation} gives a wrong result in the {name} group of ranks {ranks}: {found} instead of {expected}."
        )
        raise LaunchError(f"{message} {_ADVICE}")


def _try_all_reduce(group: ProcessGroup, dtype: torch.dtype, device: torch.device) -> tuple[list[float], list[float]]:
    values = torch.full((2,), group.rank() % 2 + 1, dtype=dtype, device=device)
    dist.all_reduce(values, group=group)
    return values.tolist(), [sum(rank % 2 + 1 for rank in range(group.size()))] * 2


def _try_all_gather(group: ProcessGroup, device: torch.device) -> tuple[list[float], list[float]]:
    gathered = all_gather(torch.full((2,), float(group.rank()), device=device), group)
    return gathered.flatten().tolist(), [float(rank) for rank in range(group.size()) for _ in range(2)]


def _try_reduce_scatter(group: ProcessGroup, device: torch.device) -> tuple[list[float], list[float]]:
    terms = torch.arange(group.size(), dtype=torch.float32, device=device).unsqueeze(1).expand(-1, 2)
    return reduce_scatter(terms, group).tolist(), [float(group.rank() * group.size())] * 2


def _try_ring(group: ProcessGroup, device: torch.device) -> tuple[list[float], list[float]]:
    rank, size = group.rank(), group.size()
    sent, received = (torch.full((2,), float(value), device=device) for value in (rank, -1))
    before, after = (rank - 1) % size, (rank + 1) % size
    steps: list[Callable[[], object]] = [
        partial(dist.send, sent, group=group, group_dst=after),
        partial(dist.recv, received, group=group, group_src=before),
    ]
    # Even ranks send first, the others receive first: else all could wait for each other.
    for step in steps if rank % 2 == 0 else reversed(steps):
        step()
    return received.tolist(), [float(before)] * 2
