"""Data parallelism: sharding of parameters, gradients and optimizer state (ZeRO, Rajbhandari et al. 2020) with FSDP2.

    ZeRO   stored between steps              additionally within a step                     gradient communication
    0      all three, unsharded              nothing                                        one all-reduce per step
    1      a shard of all three              all parameters, all gradients                  one reduce-scatter per step
    2      a shard of all three              all parameters                                 one per micro-batch
    3      a shard of all three              parameters of a block, of norm and head        one per micro-batch

ZeRO stages 1 to 3 use FSDP2 (``fully_shard``): each block, and the rest of the model (embedding, norm, head), gathers
its parameters before it runs. At ZeRO 3 the embedding, and norm with head, gather theirs apart, so that neither is in
memory while blocks run; a tied matrix stays from the lookup to the end of the backward pass. FSDP2 stores only shards
of the parameters between steps at all three ZeRO stages. In a pipeline, gradients stay unsharded until the last
micro-batch at every ZeRO stage, and so are sent once per step. Gradients are summed, never averaged: the loss is
divided by the tokens of the global batch.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hlat.model import Decoder, LocalParameter
from hlat.parallel.mesh.collectives import all_reduce_together
from hlat.precision import Mode
from hlat.runtime.backend import torch_private

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import FSDPModule


def shard_model(model: Decoder, mesh: DeviceMesh, zero: int, mode: Mode) -> None:
    """Shard a model shard, on the meta device or not, over a mesh (shards,) or (replicas, shards).

    Args:
        model: the pipeline stage, or the complete model.
        mesh: device mesh with one or two dimensions.
        zero: ZeRO stage, 1 to 3.
        mode: precision mode. Parameters are gathered in its compute dtype, gradients reduced in its reduction dtype.
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
    """Return True if ``shard_model`` has sharded a module, and FSDP2 gathers its parameters.

    FSDP2 is imported by ``shard_model`` only: its import takes 0.3 s, which a run without it need not wait for.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _prefetch_in_order(modules: Sequence["FSDPModule"]) -> None:
    """Request the parameters of each module before the module in front of it computes.

    In backward FSDP2 does so by itself. In forward its default is to request them when the host arrives at the module,
    which overlaps only as long as the host is ahead of the device.

    Args:
        modules: modules that gather parameters, in order of execution.
    """
    for module, following in pairwise(modules):
        module.set_modules_to_forward_prefetch([following])


def configure_micro_batch(model: Decoder, zero: int, last: bool) -> None:
    """Set FSDP2's handling of gradients and parameters in the next backward pass.

    Args:
        model: a model that may be sharded.
        zero: ZeRO stage.
        last: True for the last micro-batch of a step.
    """
    if is_sharded(model):
        model.set_requires_gradient_sync(last or zero >= 2)
        model.set_requires_all_reduce(last)  # between replicas: once per step
        model.set_reshard_after_backward(last or zero == 3)


def reshard_after_every_backward(model: Decoder) -> None:
    """Always free a block's gathered parameters after its backward pass (ZeRO 3 in a pipeline).

    torch's pipeline schedules tell FSDP2 before each backward pass to keep them, so that a complete pipeline stage
    would stay gathered.
    """
    if is_sharded(model):
        model.set_reshard_after_backward(True)
        model.set_reshard_after_backward = _keep_setting  # type: ignore[method-assign]


def _keep_setting(reshard_after_backward: bool, *, recurse: bool = True) -> None:
    """Ignore a call; replaces ``set_reshard_after_backward``, whose setting must not change any more."""


def reshard(model: Decoder) -> None:
    """Free the gathered parameters after a forward pass without a backward pass."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()


def sharded_parameters(model: Decoder) -> Iterator[torch.Tensor]:
    """Iterate over the padded parameter shards that FSDP2 stores between steps."""
    for group in _groups(model):
        yield from (parameter._sharded_param_data for parameter in group.fsdp_params)


def gathered_parameters(model: Decoder) -> Iterator[torch.Tensor]:
    """Iterate over the tensors that FSDP2 gathers parameters into; their storages are empty while not gathered."""
    for group in _groups(model):
        for parameter in group.fsdp_params:
            yield from parameter.all_gather_outputs


def unsharded_gradients(model: Decoder) -> Iterator[torch.Tensor]:
    """Iterate over gradients not yet reduced to shards, and gradients reduced within a replica only."""
    for group in _groups(model):
        if group._partial_reduce_output is not None:
            yield group._partial_reduce_output
        for parameter in group.fsdp_params:
            if parameter.unsharded_accumulated_grad is not None:
                yield parameter.unsharded_accumulated_grad
            if hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None:
                yield parameter._unsharded_param.grad


def _groups(model: Decoder) -> Iterator[Any]:
    """Iterate over FSDP2's parameter groups: one per block; one or two for embedding, norm and head."""
    # Norm and head may share a state.
    for state in dict.fromkeys(module._get_fsdp_state() for module in model.modules() if is_sharded(module)):
        yield from torch_private.fsdp_parameter_groups(state)


def all_reduce_gradients(parameters: Sequence[LocalParameter], group: ProcessGroup) -> None:
    """Sum the gradients of unsharded parameters over the ranks of the group (ZeRO 0)."""
    all_reduce_together([each.gradient for each in parameters if each.gradient is not None], group)
