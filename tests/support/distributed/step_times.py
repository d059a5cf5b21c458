"""Measurement of an optimizer's step: seconds on the slowest rank of a layout."""

import time
from typing import Any

import torch
import torch.distributed as dist

from hlat.config.load import parse_recipe
from hlat.optim import build_optimizer
from hlat.parallel import build_parallel
from hlat.runtime.distributed.join import Runtime


def time_steps(runtime: Runtime, content: dict[str, Any], steps: int) -> list[float]:
    """Take steps with constant gradients; return the seconds of each but the first. A job of the pool."""
    recipe = parse_recipe(content, world=runtime.world)
    mode, seed = recipe.precision.mode, recipe.training.seed
    model = build_parallel(recipe, runtime, seed)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, mode, seed, model.matrices)
    for parameter in model.parameters:
        parameter.grad = torch.full_like(parameter.detach(), 1e-3)
    seconds = []
    for _ in range(steps + 1):
        if runtime.world > 1:
            dist.barrier()
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]
