"""Data parallelism: who holds what of parameters, gradients and optimizer state (ZeRO, Rajbhandari et al. 2020).

    stage  between steps                     within a step, besides                         communication of gradients
    0      everything everywhere             nothing                                        one all-reduce a step
    1      a shard of all three              all parameters, all gradients                  one reduce-scatter a step
    2      a shard of all three              all parameters                                 one per micro-batch
    3      a shard of all three              parameters of a block, and of the ends         one per micro-batch

Stages 1 to 3 are FSDP2 (``fully_shard``): each block, and what is not in a block, gathers its parameters before it
runs. Between steps it keeps shards of the parameters at every stage. In a pipeline, gradients stay whole until the last
micro-batch at every stage, and so are sent once a step. Gradients are summed, never averaged: the loss is divided by
the tokens of the global batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hlat.model import Decoder, LocalParameter
from hlat.parallel.mesh import all_reduce_together
from hlat.precision import Mode


def shard_model(model: Decoder, mesh: DeviceMesh, zero: int, mode: Mode) -> None:
    """Shard a part of a model, on the meta device or not, over a mesh (shards,) or (replicas, shards).

    Parameters are gathered in the dtype that they are computed in, and gradients reduced in that of the mode.
    """
    narrow = mode.compute if mode.compute != mode.weights else None
    policy = MixedPrecisionPolicy(
        param_dtype=narrow,
        reduce_dtype=mode.reduction if narrow else None,
        cast_forward_inputs=False,  # the model casts what it has to
    )
    for block in model.blocks():
        fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)
    # What is not in a block (embedding, norm, head) is used at both ends of a step: gathered once at stage 3 too.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum, which 1.0 asks for otherwise


def configure_micro_batch(model: Decoder, zero: int, last: bool) -> None:
    """Say what the next backward pass does with gradients and parameters."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or zero >= 2)
        model.set_requires_all_reduce(last)  # over replicas: what a replica has added up is sent once a step
        model.set_reshard_after_backward(last or zero == 3)


def reshard_after_every_backward(model: Decoder) -> None:
    """Stage 3 in a pipeline: drop a block's gathered parameters after every backward pass.

    torch's pipelines tell FSDP2 before each backward pass to keep them, so that a whole stage would stay gathered.
    """
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(True)
        model.set_reshard_after_backward = _keep_setting  # type: ignore[method-assign]


def _keep_setting(reshard_after_backward: bool, *, recurse: bool = True) -> None:
    """In place of a setting that has been made for good."""


def reshard(model: Decoder) -> None:
    """Drop the gathered parameters after a forward pass that no backward pass follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sharded_parameters(model: Decoder) -> Iterator[torch.Tensor]:
    """What FSDP2 keeps of parameters between steps: their shards, padded."""
    for group in _groups(model):
        yield from (one._sharded_param_data for one in group.fsdp_params)


def gathered_parameters(model: Decoder) -> Iterator[torch.Tensor]:
    """What FSDP2 gathers parameters into; empty storages while it does not."""
    for group in _groups(model):
        for one in group.fsdp_params:
            yield from one.all_gather_outputs


def unsharded_gradients(model: Decoder) -> Iterator[torch.Tensor]:
    """The gradients that FSDP2 has and has not yet reduced to shards, and those that it has reduced within replicas."""
    for group in _groups(model):
        if group._partial_reduce_output is not None:
            yield group._partial_reduce_output
        for one in group.fsdp_params:
            if one.unsharded_accumulated_grad is not None:
                yield one.unsharded_accumulated_grad
            if hasattr(one, "_unsharded_param") and one._unsharded_param.grad is not None:
                yield one._unsharded_param.grad


def _groups(model: Decoder) -> Iterator[Any]:
    """FSDP2's groups of parameters, one per block and one for the rest of each part."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from module._get_fsdp_state()._fsdp_param_groups


def all_reduce_gradients(held: Sequence[LocalParameter], group: ProcessGroup) -> None:
    """Stage 0: add up the gradients of parameters that every rank of the group holds whole."""
    all_reduce_together([one.gradient for one in held if one.gradient is not None], group)
