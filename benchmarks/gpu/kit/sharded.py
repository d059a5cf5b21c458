"""FSDP2 on one rank beside the plain model: the same steps, in bits, seconds and memory.

process group of one rank (NCCL) --mesh--> hlat's shard_model --> steps;  plain model --> the same steps
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from hlat.config import Recipe
from hlat.runtime.backend.table import backend_of
from kit.child import Context, free_memory
from kit.shapes import recipe
from kit.training import Trainer, folder, forget_peaks, memory

_STEPS = 4
_UNCOMPILED = {"run.compile": "none"}


def run(context: Context) -> None:
    """Compare bits of a small model in fp32, then the cost of a large one in mixed precision."""
    with context.part("bits"):
        asked = recipe("parity", context.tiny, context.device, context.work, _UNCOMPILED | {"precision.mode": "fp32"})
        plain, sharded = both(context, "fp32", asked)
        # One rank gathers and reduces its own numbers, and fp32 has no casts: nothing may round differently.
        same = all(plain[name] == sharded[name] for name in ("losses", "norms"))
        context.check("fp32: sharded on one rank has the bits of the plain model", same, (plain, sharded))
    with context.part("cost"):
        sizes = {} if context.tiny else {"model.vocab_size": 32768}
        asked = recipe("r8", context.tiny, context.device, context.work, _UNCOMPILED | sizes, layers=2)
        plain, sharded = both(context, "mixed", asked)
        context.found({"sharded_step_ratio": sharded["step_seconds"] / plain["step_seconds"]})
        # Gradients differ by their rounding to bf16: FSDP2 rounds those of a whole gathered matrix. The first loss
        # is before any update.
        context.check("mixed: the first loss has the same bits", plain["losses"][0] == sharded["losses"][0])


def both(context: Context, name: str, asked: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train a recipe unsharded, then at ZeRO 3 on one rank."""
    plain = train(context, f"{name}, plain", asked)
    free_memory()
    changed = asked.model_copy(update={"parallel": asked.parallel.model_copy(update={"zero": 3})})
    factory = "hlat.parallel.parallel_model.create_process_groups"  # hlat makes no group for one process
    with one_rank_mesh(context) as groups, patch(factory, lambda *given, **more: groups):
        sharded = train(context, f"{name}, sharded", changed)
    free_memory()
    return plain, sharded


@contextmanager
def one_rank_mesh(context: Context) -> Iterator[Any]:
    """Join a group of one rank for the block; yield hlat's process groups, with a mesh of one shard."""
    from torch.distributed.device_mesh import init_device_mesh

    from hlat.parallel.process_groups import SINGLE_PROCESS

    library = backend_of(context.device).collectives
    assert library is not None, "torch has collectives for these devices"
    store = folder(context.work, "store") / "file"
    dist.init_process_group(library.name, init_method=f"file://{store}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh(context.device, (1,), mesh_dim_names=("shards",))
        yield replace(SINGLE_PROCESS, shard_mesh=mesh)
    finally:
        dist.destroy_process_group()


def train(context: Context, name: str, asked: Recipe) -> dict[str, Any]:
    """Train some steps; return losses, norms, seconds and memory."""
    trainer = Trainer(asked)
    first = trainer.step()
    forget_peaks(trainer.device)
    steps = [first, *(trainer.step() for _ in range(_STEPS))]
    found = {
        "losses": [step.loss for step in steps],
        "norms": [step.norm for step in steps],
        "step_seconds": statistics.median(step.seconds for step in steps[1:]),
        **memory(trainer.device),
    }
    context.found({f"{name}: {key}": value for key, value in found.items()})
    return found
