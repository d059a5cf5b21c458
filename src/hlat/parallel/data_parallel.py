"""Data parallelism with FSDP2 (ZeRO, Rajbhandari et al. 2020), all other sums of gradients over ranks, and their norm.

    complete sequences on the CPU -> the positions of this rank, on its device -> micro-batches
    pass_label("forward", 3, 5) -> "hlat::forward stage 3 micro-batch 5" in a profile -> parse_pass_label
    micro-batch -> backward -> FSDP2 reduces to shards, or one all-reduce of all per step (ZeRO 0)
        -> ReplicatedGradients: sums over ranks that computed different terms of the same gradient
        -> ``owned_rows``, each counted once -> ``sum_of_squares`` -> ``sum_over_world`` -> norm

    ZeRO   stored between steps              additionally within a step                     gradient communication
    0      all three, unsharded              nothing                                        one all-reduce per step
    1      a shard of all three              all parameters, all gradients                  one reduce-scatter per step
    2      a shard of all three              all parameters                                 one per micro-batch
    3      a shard of all three              parameters of a block, of norm and head        one per micro-batch

The three are parameters, gradients and optimizer state. ZeRO stages 1 to 3 use FSDP2 (``fully_shard``): each block, and
the rest of the model (embedding, norm, head), gathers its parameters before it runs. At ZeRO 3 the embedding, and norm
with head, gather theirs apart, so that neither is in memory while blocks run; a tied matrix stays from the lookup to
the end of the backward pass. FSDP2 stores only shards of the parameters between steps at all three ZeRO stages. In a
pipeline, gradients stay unsharded until the last micro-batch at every ZeRO stage, and so are sent once per step.
Gradients are summed, never averaged: the loss is divided by the tokens of the global batch.

Sums of replicated parameters after backward, once per step:

    norm weights with sequence parallelism       each tensor rank has the term of its shard of the sequence
    q and k norms with tensor parallelism        each tensor rank has the term of its heads
    k and v rows of a replicated kv head         each copy has the term of its query heads
    a tied embedding on two pipeline stages      one has the term of the lookup, the other that of the head

The description of the architecture names these ranks for each tensor (``model/spec.py``). An all-reduce gives every
copy the same bits, so copies that start equal stay equal.

The norm of tensors of any size: norms of short runs of elements, fp32 -> squares, summed in float64 -> a scalar. A
sequential fp32 sum of n squares has a relative error of up to n 2^-24, and is always too low once the sum is much
larger than its terms. torch's norm on a CPU sums a complete tensor that way: 1e-4 too low for 4 million elements,
1.6e-2 for 131 million, and the result depends on how the tensors are sharded. Here no fp32 sum has more than ``_RUN``
terms. Of bf16 tensors on a CPU the sums of squares of short runs are float64 at once.
"""

import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from hlat.model import Decoder, GradientSum, LocalParameter
from hlat.optim import square_sums
from hlat.parallel.layout import Layout
from hlat.parallel.process_groups import ProcessGroups, all_reduce_together
from hlat.parallel.stages.in_flight import PassKind
from hlat.precision import Mode
from hlat.runtime.backend import torch_private
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import in_fake_world

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import FSDPModule


class MicroBatch(NamedTuple):
    """Sequences, complete or restricted to the positions of a rank."""

    inputs_BS: torch.Tensor  # token ids, int64
    labels_BS: torch.Tensor  # the next token of each, int64; ``hlat.model.IGNORED`` for none
    # Position of each token within its document, int64; every 0 starts a document. None if attention is not restricted
    # to documents.
    positions_BS: torch.Tensor | None = None

    def local(self, spans: tuple[tuple[int, int], ...], device: torch.device) -> "MicroBatch":
        """Select the positions of (start, stop) pairs from complete sequences, and copy them to a device."""

        def select(rows_BS: torch.Tensor) -> torch.Tensor:
            selected = rows_BS if len(spans) == 1 else torch.cat([rows_BS[:, a:b] for a, b in spans], dim=1)
            return selected.to(device, non_blocking=True)

        positions = None if self.positions_BS is None else select(self.positions_BS)
        return MicroBatch(select(self.inputs_BS), select(self.labels_BS), positions)

    def split(self, size: int) -> list["MicroBatch"]:
        inputs, labels = self.inputs_BS.split(size), self.labels_BS.split(size)
        positions = [None] * len(inputs) if self.positions_BS is None else self.positions_BS.split(size)
        return [MicroBatch(*fields) for fields in zip(inputs, labels, positions, strict=True)]


_LABEL = re.compile(r"hlat::(\w+) stage (\d+) micro-batch (\d+)")


class LabelledPass(NamedTuple):
    """A pass of a micro-batch through a stage, both counted from 0."""

    kind: PassKind
    stage: int
    micro_batch: int


def pass_label(kind: PassKind, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
    """Label everything in the block, for profilers and rehearsals."""
    return record_function(f"hlat::{kind} stage {stage} micro-batch {micro_batch}")


def parse_pass_label(text: str) -> LabelledPass | None:
    """Return the pass that a label names; None for labels of others."""
    found = _LABEL.fullmatch(text)
    return None if found is None else LabelledPass(cast("PassKind", found[1]), int(found[2]), int(found[3]))


def shard_model(model: Decoder, mesh: DeviceMesh, zero: int, mode: Mode) -> None:
    """Shard a pipeline stage, on the meta device or not, over a mesh (shards,) or (replicas, shards); ZeRO 1 to 3.

    Parameters are gathered in the mode's compute dtype, gradients reduced in its reduction dtype.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415  (see ``is_sharded``)

    narrow = mode.compute if mode.compute != mode.weights else None
    policy = MixedPrecisionPolicy(
        param_dtype=narrow,
        reduce_dtype=mode.reduction if narrow else None,
        cast_forward_inputs=False,  # the model casts its inputs itself
    )
    order = [
        fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy) for block in model.blocks()
    ]
    if zero == 3 and model.embedding is not None and model.head is not None and not model.config.tie_embeddings:
        embedding = fully_shard(model.embedding, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        embedding.set_unshard_in_backward(False)  # the gradient of a lookup needs no weights
        assert model.norm is not None, "a model with a head has the norm before it"
        # The backward pass of norm and head follows their forward pass at once.
        head = fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False, mp_policy=policy)[0]
        head._set_unshard_async_op(True)  # else the buffer of this gather would stay during the loss
        order = [embedding, *order, head]
    # What is left is used at the start and end of a step: gathered once in it at ZeRO 3 too.
    rest = fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    _prefetch_in_order([rest, *order])
    for module in model.modules():
        if is_sharded(module):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(
                True
            )  # a factor of 1.0 would use a scaled sum, which gloo does not have


def is_sharded(module: "nn.Module") -> TypeGuard["FSDPModule"]:
    """True if ``shard_model`` has sharded a module, and FSDP2 gathers its parameters."""
    # FSDP2 is imported by shard_model only: its import takes 0.3 s, which a run without it need not wait for.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _prefetch_in_order(modules: Sequence["FSDPModule"]) -> None:
    # In backward FSDP2 requests parameters before the module in front computes. In forward its default is to request
    # them when the host arrives at the module, which overlaps only as long as the host is ahead of the device.
    for module, following in pairwise(modules):
        module.set_modules_to_forward_prefetch([following])


def configure_micro_batch(model: Decoder, zero: int, last: bool) -> None:
    """Set FSDP2's handling of gradients and parameters in the next backward pass; nothing if it is not sharded."""
    if is_sharded(model):
        model.set_requires_gradient_sync(last or zero >= 2)
        model.set_requires_all_reduce(last)  # between replicas: once per step
        model.set_reshard_after_backward(last or zero == 3)


def reshard_after_every_backward(model: Decoder) -> None:
    """Always free a block's gathered parameters after its backward pass (ZeRO 3 in a pipeline)."""
    if is_sharded(model):
        model.set_reshard_after_backward(True)
        # torch's pipeline schedules tell FSDP2 before each backward pass to keep them, so that a complete stage would
        # stay gathered.
        model.set_reshard_after_backward = _keep_setting  # type: ignore[method-assign]


def _keep_setting(reshard_after_backward: bool, *, recurse: bool = True) -> None:
    """Replace ``set_reshard_after_backward``, whose setting must not change any more."""


def reshard(model: Decoder) -> None:
    """Free the gathered parameters after a forward pass without a backward pass."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()


def sharded_parameters(model: Decoder) -> Iterator[torch.Tensor]:
    """Iterate over the padded parameter shards that FSDP2 stores between steps."""
    for group in _fsdp_groups(model):
        yield from (parameter._sharded_param_data for parameter in group.fsdp_params)


def gathered_parameters(model: Decoder) -> Iterator[torch.Tensor]:
    """Iterate over the tensors that FSDP2 gathers parameters into; their storages are empty while not gathered."""
    for group in _fsdp_groups(model):
        for parameter in group.fsdp_params:
            yield from parameter.all_gather_outputs


def unsharded_gradients(model: Decoder) -> Iterator[torch.Tensor]:
    """Iterate over gradients not yet reduced to shards, and gradients reduced within a replica only."""
    for group in _fsdp_groups(model):
        if group._partial_reduce_output is not None:
            yield group._partial_reduce_output
        for parameter in group.fsdp_params:
            if parameter.unsharded_accumulated_grad is not None:
                yield parameter.unsharded_accumulated_grad
            if hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None:
                yield parameter._unsharded_param.grad


def _fsdp_groups(model: Decoder) -> Iterator[Any]:
    """FSDP2's parameter groups: one per block; one or two for embedding, norm and head."""
    # Norm and head may share a state.
    for state in dict.fromkeys(module._get_fsdp_state() for module in model.modules() if is_sharded(module)):
        yield from torch_private.fsdp_parameter_groups(state)


def gradients_of(parameters: Sequence[LocalParameter]) -> list[torch.Tensor]:
    """Return the gradients of parameters that have one."""
    return [gradient for each in parameters if (gradient := each.gradient) is not None]


@dataclass(frozen=True)
class ReplicatedGradients:
    """Parameters of a rank whose gradients must be summed over several ranks."""

    over_tensor: Sequence[LocalParameter]
    over_kv: Sequence[LocalParameter]  # with k or v rows, over the ranks that share a kv head
    tied: Sequence[LocalParameter]  # this rank's copies of a tied embedding
    groups: ProcessGroups

    @classmethod
    def of(cls, parameters: Sequence[LocalParameter], layout: Layout, groups: ProcessGroups) -> "ReplicatedGradients":
        """Select the parameters to reduce from all local parameters of a rank."""
        partial = {GradientSum.TENSOR, *([GradientSum.SEQUENCE] if layout.sequence_parallel else [])}
        over_tensor = [each for each in parameters if groups.tensor is not None and partial & _kinds_of_sums(each)]
        over_kv = [
            each for each in parameters if groups.kv is not None and GradientSum.KEY_COPIES in _kinds_of_sums(each)
        ]
        tied = [each for each in parameters if GradientSum.TIED in _kinds_of_sums(each)]
        is_tied = groups.embedding is not None or len(tied) > 1
        return cls(over_tensor, over_kv, tied if is_tied else [], groups)

    def all_reduce(self) -> None:
        if self.over_tensor and self.groups.tensor is not None:
            all_reduce_together(gradients_of(self.over_tensor), self.groups.tensor)
        if self.over_kv and self.groups.kv is not None:
            rows = [
                view
                for parameter in self.over_kv
                for block in parameter.row_blocks()
                if block.tensor.spec.gradient_sum is GradientSum.KEY_COPIES and parameter.gradient is not None
                for view in parameter.row_views(block, parameter.gradient)
            ]
            all_reduce_together(rows, self.groups.kv)
        tied = gradients_of(self.tied)
        if len(tied) == 2:  # this rank has both the embedding and the head
            tied[0].add_(tied[1])
            tied[1].copy_(tied[0])
        elif tied and self.groups.embedding is not None:
            all_reduce_together(tied, self.groups.embedding)


def _kinds_of_sums(parameter: LocalParameter) -> set[GradientSum]:
    return {tensor.spec.gradient_sum for tensor in parameter.layout.tensors}


def owned_rows(parameter: LocalParameter, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return views of the rows of ``tensor`` (local shape of the parameter) that this rank owns and counts in norms."""
    if not parameter.owned or tensor.numel() == 0:
        return []
    if parameter.layout.all_owned:
        return [tensor]
    return [view for block in parameter.row_blocks() if block.owned for view in parameter.row_views(block, tensor)]


def sum_over_world(values: torch.Tensor, world: int) -> torch.Tensor:
    """Sum a tensor over all ranks, in place; ``world`` 1 needs no process group."""
    if world > 1:
        dist.all_reduce(values)
    return values


def sum_on_host(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum scalars of one device exactly and round once: float64, on the CPU; none gives 0."""
    # On the CPU, which is the same on every device type: some devices have no float64.
    values = torch.stack(list(losses)).tolist() if losses else []
    # math.fsum is exact in any order, and refuses infinities of both signs, which a plain sum makes NaN.
    return torch.tensor(math.fsum(values) if all(map(math.isfinite, values)) else sum(values), dtype=torch.float64)


_RUN = 256  # elements summed in fp32
_SMALL = 1 << 12  # elements; smaller tensors are concatenated, since a call each would cost more
_CONCATENATED = 1 << 15  # elements to copy at a time: they fit into the cache and add no memory peak
_SUMMED = 1 << 14  # float64 numbers summed at a time: torch starts no threads for so few


def sum_of_squares(tensors: Sequence[torch.Tensor], zero: torch.Tensor) -> torch.Tensor:
    """Sum the squares of all elements of any number of tensors: a new scalar of the dtype and device of ``zero``."""
    if not tensors:
        return zero.clone()
    if not backend_of(zero.device).sums_norms_in_order or in_fake_world():
        # Does not synchronise. CUDA's kernel sums at most 128 squares per thread, and the threads in a tree.
        return torch.stack(torch._foreach_norm(list(tensors), 2.0, dtype=zero.dtype)).square().sum()
    # The relative error is below (_RUN + 4) 2^-24 = 1.6e-5, for any order of summation within a run and tensors of any
    # size and sharding; of bf16 tensors it is the rounding of the result. The number of threads changes no bit.
    narrow = [tensor for tensor in tensors if tensor.dtype == torch.bfloat16]
    others = [tensor for tensor in tensors if tensor.dtype != torch.bfloat16]
    norms = [norm for flat in _flat(others) for norm in _norms_of_runs(flat.to(zero.dtype))]
    totals = (
        [_sum_in_order(square_sums(list(_flat(narrow))))] if narrow else []
    )  # its library is not compiled for nothing
    if norms:
        totals.append(_sum_in_order(torch.cat(norms).double().square()))
    return torch.stack(totals).sum().to(zero.dtype) if totals else zero.clone()


def _norms_of_runs(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    multiple = flat.numel() // _RUN * _RUN
    if multiple:
        yield torch.linalg.vector_norm(flat[:multiple].view(-1, _RUN), dim=1)
    if multiple < flat.numel():
        yield torch.linalg.vector_norm(flat[multiple:]).reshape(1)


def _sum_in_order(values: torch.Tensor) -> torch.Tensor:
    # Torch divides a longer sum over its threads, which changes the order.
    while values.numel() > _SUMMED:
        values = torch.stack([part.sum() for part in values.split(_SUMMED)])
    return values.sum()


def _flat(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    pending: list[torch.Tensor] = []
    count = 0
    for tensor in tensors:
        flat = tensor.reshape(-1)
        if flat.numel() > _SMALL:
            yield flat
            continue
        pending.append(flat)
        count += flat.numel()
        if count >= _CONCATENATED:
            yield torch.cat(pending)
            pending, count = [], 0
    if pending:
        yield torch.cat(pending)
