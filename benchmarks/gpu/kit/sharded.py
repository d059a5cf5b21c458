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
from hlat.runtime.backend import backend_of
from kit.child import Context, free_memory
from kit.shapes import recipe
from kit.training import Trainer, folder, forget_peaks, memory

_STEPS = 4


def run(context: Context) -> None:
    """Train both."""
    overrides: dict[str, Any] = {"run.compile": "none"}
    if not context.tiny:
        overrides["model.vocab_size"] = 32768
    asked = recipe("r8", context.tiny, context.device, context.work, overrides, layers=2)
    with context.part("plain"):
        plain = train(context, "plain", asked)
    free_memory()
    sharded: dict[str, Any] = {}
    with (
        context.part("sharded"),
        one_rank_mesh(context) as groups,
        patch("hlat.parallel.parallel_model.create_process_groups", lambda *given, **more: groups),
    ):
        changed = asked.model_copy(update={"parallel": asked.parallel.model_copy(update={"zero": 3})})
        sharded = train(context, "sharded", changed)
    if context.errors:
        return
    context.found({"sharded_step_ratio": sharded["step_seconds"] / plain["step_seconds"]})
    difference = [a - b for a, b in zip(sharded["losses"], plain["losses"], strict=True)]
    context.found({"losses: sharded minus plain": difference})
    # One rank gathers and reduces its own numbers. FSDP2 reduces gradients in the mode's dtype, fp32 in mixed.
    context.check("sharded on one rank has the losses of the plain model, bit for bit", not any(difference), difference)


@contextmanager
def one_rank_mesh(context: Context) -> Iterator[Any]:
    """Join a group of one rank for the block; yield hlat's process groups, with a mesh of one shard."""
    from torch.distributed.device_mesh import init_device_mesh

    from hlat.parallel.mesh.process_groups import SINGLE_PROCESS

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
