"""A run on the test device and what it decided, read from torch's objects rather than from hlat's answers."""

from typing import Any

import torch
import torch.distributed as dist

from hlat.config.load import parse_recipe
from hlat.optim import build_optimizer
from hlat.parallel import build_parallel, decide_compilation
from hlat.runtime.distributed.join import join_run
from hlat.training import accumulate_gradients, update
from tests.support.distributed.jobs import batch_of
from tests.support.neuron.compiling import COMPILED
from tests.support.neuron.device_module import native


def decide_and_train(content: dict[str, Any]) -> dict[str, Any]:
    """Train two steps; return the decisions that were taken, and the peak of the device's memory in bytes."""
    runtime = join_run("neuron")
    recipe = parse_recipe(content, world=runtime.world)
    eager = recipe.model_copy(update={"run": recipe.run.model_copy(update={"compile": "none"})})
    model = build_parallel(eager, runtime, seed=None)
    for one in model.local_parameters:
        torch.nn.init.ones_(one.tensor)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, recipe.precision.mode, 3, model.matrices)
    for step in (1, 2):
        update(model, optimizer, eager, step, accumulate_gradients(model, batch_of(model, eager, step)))
    group = optimizer.param_groups[0]
    compilation = decide_compilation(recipe, runtime.device, runtime.world)
    return {
        "process group": dist.get_backend() if runtime.world > 1 else "none: one process",
        "optimizer": (group.get("fused"), group.get("foreach")),
        "graphs": COMPILED[0],
        "counters": optimizer.state[model.local_parameters[0].parameter]["step"].device.type,
        "torch's deterministic mode": torch.get_deterministic_debug_mode(),
        "compiled": compilation.on,
        "weights": str(model.local_parameters[0].tensor.dtype).removeprefix("torch."),
        "peak": int(native().stand_in_peak_memory()),
    }
