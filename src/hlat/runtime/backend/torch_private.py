"""Private names of PyTorch that hlat uses, by release, and the releases of PyTorch that it was tested with.

    installed release --untested_torch_warning--> a warning at the start, or nothing
    state of FSDP2 --fsdp_parameter_groups--> its parameter groups, in every release

Any release may remove a private name. Each one that the code uses is listed here once, with its purpose. One test
resolves all of them, another finds private names in the code that are missing here.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from typing import Any

TESTED_RELEASES = ("2.11", "2.13", "2.14")  # releases that passed the complete test suite

RELEASES_WITH_ALL_NAMES = ("2.11", "2.12", "2.13", "2.14")
"""Releases that define the names below, but for those of ``FIRST_RELEASE``. 2.15 lacks two of them."""

FIRST_RELEASE: dict[str, str] = {
    # Releases before lack the name, and the code does without.
    "torch._meta_registrations.meta__scaled_dot_product_fused_attention_overrideable_backward": "2.12",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups": "2.12",
    "torch.distributed.pipelining.PipelineStage._warmup_backward_result": "2.12",
    "torch.distributed.pipelining.PipelineStage._warmup_forward_vote": "2.12",
}

PRIVATE_NAMES: dict[str, str] = {
    # module.name or module.class.name -> purpose
    "torch._C._TorchDispatchModeKey": "rehearsals: disable and enable fake tensors",
    "torch._C._distributed_c10d.PrefixStore": "rendezvous: separate the keys of each rendezvous",
    "torch._C._distributed_c10d.Store": "the type of a rendezvous store",
    "torch._C._distributed_c10d.TCPStore": "rendezvous: a store on a listening socket of hlat's",
    "torch._C._get_dispatch_mode": "rehearsals: disable and enable fake tensors",
    "torch._C._set_dispatch_mode": "rehearsals: disable and enable fake tensors",
    "torch._C._unset_dispatch_mode": "rehearsals: disable and enable fake tensors",
    "torch._foreach_add_": "one kernel for many tensors: optimizer",
    "torch._foreach_copy_": "one kernel for many tensors: collectives",
    "torch._foreach_mul_": "one kernel for many tensors: clipping",
    "torch._foreach_norm": "one kernel for many tensors: norms",
    "torch._fused_sdp_choice": "which kernel computes attention, for the message at the start",
    "torch._higher_order_ops.flex_attention.flex_attention": "tensors that a compiled block saves",
    "torch._meta_registrations.meta__scaled_dot_product_fused_attention_overrideable_backward": "shapes, in rehearsals",
    "torch._ops.OpOverload._overloadpacket": "rehearsals: operations by name",
    "torch._ops.OpOverload._schema": "rehearsals: operations by name",
    "torch._subclasses.fake_tensor.FakeTensorMode": "rehearsals: tensors without memory",
    "torch.ScriptObject._type": "rehearsals: the group of a collective",
    "torch.UntypedStorage._cdata": "memory is counted once per storage",
    "torch.cpu._is_amx_tile_supported": "precision: detect fast bf16 products",
    "torch.cpu._is_avx512_bf16_supported": "precision: detect fast bf16 products",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "write checkpoint indexes that DCP can read",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "sharding: FSDP2's state, for memory and gradients",
    "torch.distributed.fsdp.FSDPModule._set_unshard_async_op": "sharding: free the buffer of the head's gather",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._sharded_param_data": "sharding: as above",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param": "sharding: as above",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._partial_reduce_output": "sharding: as above",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups": "sharding: as above",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group": "sharding: as above, in 2.11",
    "torch.distributed.pipelining.PipelineStage._create_grad_recv_info": "pipelines: buffers when they are needed",
    "torch.distributed.pipelining.PipelineStage._get_init_p2p_neighbors_ops": "pipelines: first messages, in 2.11",
    "torch.distributed.pipelining.PipelineStage._prepare_forward_infra": "pipelines: buffers when they are needed",
    "torch.distributed.pipelining.PipelineStage._retrieve_recv_activations": "pipelines: free receive buffers",
    "torch.distributed.pipelining.PipelineStage._retrieve_recv_grads": "pipelines: free receive buffers",
    "torch.distributed.pipelining.PipelineStage._warmup_backward_result": "rehearsals: stages without peers",
    "torch.distributed.pipelining.PipelineStage._warmup_forward_vote": "rehearsals: stages without peers",
    "torch.distributed.pipelining.schedules._batch_p2p": "pipelines: send as the schedules receive",
    "torch.distributed.tensor._sharding_prop.ShardingPropagator": "rehearsals: observers and DTensor",
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached": "the same",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": "rehearsals: clear state between rehearsals",
    "torch.nn.Module._forward_hooks": "memory: hooks of tensor parallelism around recomputed blocks",
    "torch.nn.Module._forward_pre_hooks": "memory: hooks of tensor parallelism around recomputed blocks",
    "torch.ops.aten._scaled_dot_product_cudnn_attention": "memory: tensors that a compiled block saves; its FLOPs",
    "torch.ops.aten._scaled_dot_product_cudnn_attention_backward": "its FLOPs",
    "torch.ops.aten._scaled_dot_product_efficient_attention": "memory: tensors that a compiled block saves; its FLOPs",
    "torch.ops.aten._scaled_dot_product_efficient_attention_backward": "its FLOPs",
    "torch.ops.aten._scaled_dot_product_flash_attention": "memory: tensors that a compiled block saves; its FLOPs",
    "torch.ops.aten._scaled_dot_product_flash_attention_backward": "its FLOPs",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "attention on a CPU, per document and chunk",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "its backward pass",
    "torch.ops.aten._scaled_dot_product_fused_attention_overrideable": "rehearsals: attention of a device",
    "torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward": "its backward pass",
    "torch.ops._c10d_functional": "collectives that a compiled block saves the results of",
    "torch.optim.adam._get_value": "rehearsals: step counters of AdamW without a fused kernel",
    "torch.ops.aten._efficient_attention_forward": "rehearsals: attention of a device",
    "torch.nn.attention.bias.CausalBias._materialize": "rehearsals: masks of a device",
    "torch.ops.aten._scaled_mm": "memory: tensors that a compiled block saves",
    "torch.ops.aten._to_copy": "profiles: the kind of an operator",
    "torch.ops.mkldnn._linear_pointwise": "products by oneDNN, and by packed weights",
    "torch.ops.mkldnn._reorder_linear_weight": "generation: weights packed for oneDNN",
    "torch.ops.c10d._allgather_base_": "rehearsals: the kind of a collective",
    "torch.ops.c10d._reduce_scatter_base_": "rehearsals: the kind of a collective",
    "torch.testing._internal.distributed.fake_pg.FakeStore": "rehearsals: a world simulated by one process",
    "torch.utils._python_dispatch.TorchDispatchMode": "rehearsals: intercept every operation",
    "torch.utils._python_dispatch._disable_current_modes": "context parallelism: real index tables in rehearsals",
    "torch.utils._pytree.tree_leaves": "rehearsals: tensors among arguments",
}

COMPILED_NAMES = ("_torchdynamo_orig_callable",)
"""Attributes that torch.compile sets on its result; without them blocks would count as not compiled."""


def fsdp_parameter_groups(state: Any) -> list[Any]:
    """Return FSDP2's parameter groups: any number from torch 2.12 on, at most one before."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def most_graphs(count: int) -> dict[str, Any]:
    """Return arguments of ``torch.compile`` for as many graphs as ``count``."""
    import torch  # noqa: PLC0415

    if "recompile_limit" in signature(torch.compile).parameters:
        return {"recompile_limit": count}
    from torch._dynamo import config  # noqa: PLC0415

    # 2.11 has no such argument, only a setting for all functions.
    config.recompile_limit = max(config.recompile_limit, count)
    return {}


@cache
def shapes_of_overrideable_backward() -> Any:
    """Let tensors without memory go through the backward pass of an accelerator's own attention."""
    import torch  # noqa: PLC0415
    from torch import _meta_registrations  # noqa: PLC0415

    if hasattr(_meta_registrations, "meta__scaled_dot_product_fused_attention_overrideable_backward"):
        return None

    # 2.11 has none.
    def shapes(gradient: Any, q: Any, k: Any, v: Any, bias: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        return (*map(torch.empty_like, (q, k, v)), None if bias is None else torch.empty_like(bias))

    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("_scaled_dot_product_fused_attention_overrideable_backward", shapes)
    return library  # which keeps the registration


def untested_torch_warning(installed: str | None = None) -> str:
    """Return a warning for an untested release such as ``2.13.0+cpu``; None reads the installed one without torch."""
    installed = installed or _installed()
    if not installed or _release(installed) in TESTED_RELEASES:
        return ""
    *others, last = TESTED_RELEASES
    tested = f"{', '.join(others)} and {last}"
    return (
        f"PyTorch {installed} is installed; hlat was tested with {tested} only. The run continues; check its results."
    )


def split_backward_problem(installed: str | None = None) -> str:
    """Return why this release cannot compute a pipeline's gradients by weight apart; empty if it can."""
    release = _release(installed or _installed())
    if release not in ("2.11", "2.12"):
        return ""
    # The loss is such a function. 2.12.1 was tried: the first step of zbv on two ranks raises an error, in the backward
    # pass by weight of the last stage. 2.13 also corrects weights that a stage uses several times; models have none.
    return f"PyTorch {release} cannot split the backward pass at functions of Python."


def _installed() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _release(installed: str) -> str:
    return ".".join(installed.split("+", maxsplit=1)[0].split(".")[:2])
