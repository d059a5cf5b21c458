"""The private names of PyTorch that hlat uses, and the releases of PyTorch that it was tested with.

    installed release --untested_torch--> a line to be said at the start, or nothing

A private name may go in any release. Every one that the code uses stands here once, with what would be lost without
it; a test resolves them, and another one finds names in the code that are not here.
"""

from importlib.metadata import PackageNotFoundError, version

TESTED_RELEASES = ("2.13",)
"""Releases that the whole suite was run with."""

RELEASES_WITH_ALL_NAMES = ("2.12", "2.13", "2.14")
"""Releases in whose files all of the names below were found. 2.11 lacks four of them, 2.15 two."""

PRIVATE_NAMES: dict[str, str] = {
    # where it is found, as module.name or module.class.name -> what it is for
    "torch._C._TorchDispatchModeKey": "rehearsals: fake tensors, put aside and taken up again",
    "torch._C._distributed_c10d.PrefixStore": "meeting: names of one meeting, apart from those of others",
    "torch._C._distributed_c10d.Store": "the type of a rendezvous store",
    "torch._C._distributed_c10d.TCPStore": "meeting: a store on a socket of our own",
    "torch._C._get_dispatch_mode": "rehearsals: fake tensors, put aside and taken up again",
    "torch._C._set_dispatch_mode": "rehearsals: fake tensors, put aside and taken up again",
    "torch._C._unset_dispatch_mode": "rehearsals: fake tensors, put aside and taken up again",
    "torch._foreach_add_": "one kernel for many tensors: optimizer",
    "torch._foreach_copy_": "one kernel for many tensors: collectives",
    "torch._foreach_mul_": "one kernel for many tensors: clipping",
    "torch._foreach_norm": "one kernel for many tensors: norms",
    "torch._fused_sdp_choice": "which kernel computes attention, to be told at the start",
    "torch._higher_order_ops.flex_attention.flex_attention": "what a compiled block keeps of attention",
    "torch._ops.OpOverload._overloadpacket": "rehearsals: operations by name",
    "torch._ops.OpOverload._schema": "rehearsals: operations by name",
    "torch._subclasses.fake_tensor.FakeTensorMode": "rehearsals: tensors without memory",
    "torch.ScriptObject._type": "rehearsals: the group of a collective",
    "torch.UntypedStorage._cdata": "memory is counted once per storage",
    "torch.cpu._is_amx_tile_supported": "precision: whether bf16 products are fast",
    "torch.cpu._is_avx512_bf16_supported": "precision: whether bf16 products are fast",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "the index of a checkpoint is one that DCP reads",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "sharding: what FSDP2 keeps, for sums of memory and gradients",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._sharded_param_data": "sharding: as above",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param": "sharding: as above",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._partial_reduce_output": "sharding: as above",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups": "sharding: as above",
    "torch.distributed.pipelining.PipelineStage._warmup_backward_result": "rehearsals: stages that nobody answers",
    "torch.distributed.pipelining.PipelineStage._warmup_forward_vote": "rehearsals: stages that nobody answers",
    "torch.distributed.tensor._sharding_prop.ShardingPropagator": "rehearsals: observers and DTensor",
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._fake_mode_lock": "rehearsals: observers and DTensor",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": "rehearsals: nothing of one is left to the next",
    "torch.nn.Module._forward_hooks": "memory: hooks of tensor parallelism around recomputed parts",
    "torch.nn.Module._forward_pre_hooks": "memory: hooks of tensor parallelism around recomputed parts",
    "torch.ops.aten._scaled_dot_product_cudnn_attention": "memory: what a compiled block keeps of attention",
    "torch.ops.aten._scaled_dot_product_efficient_attention": "memory: what a compiled block keeps of attention",
    "torch.ops.aten._scaled_dot_product_flash_attention": "memory: what a compiled block keeps of attention",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "attention on a CPU, by documents and in pieces",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "its backward pass",
    "torch.ops.aten._scaled_mm": "memory: what a compiled block keeps of fp8 products",
    "torch.ops.aten._to_copy": "profiles: the kind of an operator",
    "torch.ops.c10d._allgather_base_": "rehearsals: the kind of a collective",
    "torch.ops.c10d._reduce_scatter_base_": "rehearsals: the kind of a collective",
    "torch.testing._internal.distributed.fake_pg.FakeStore": "rehearsals: a world of one process",
    "torch.utils._python_dispatch.TorchDispatchMode": "rehearsals: sees every operation",
    "torch.utils._python_dispatch._disable_current_modes": "context parallelism: tables are real in a rehearsal too",
    "torch.utils._pytree.tree_leaves": "rehearsals: tensors among arguments",
}

COMPILED_NAMES = ("_torchdynamo_orig_callable",)
"""Attributes that torch.compile gives to what it returned; without them blocks count as not compiled."""


def untested_torch_warning(installed: str | None = None) -> str:
    """A line for a release of PyTorch that hlat was not tested with; empty for one that it was.

    Args:
        installed: its version, as ``2.13.0+cpu``; None asks the installation, without importing torch.
    """
    if installed is None:
        try:
            installed = version("torch")
        except PackageNotFoundError:
            return ""
    if ".".join(installed.split("+")[0].split(".")[:2]) in TESTED_RELEASES:
        return ""
    tested = " and ".join(TESTED_RELEASES)
    return (
        f"PyTorch {installed} is installed; hlat was tested with {tested} only. It goes on; results are yours to check."
    )
