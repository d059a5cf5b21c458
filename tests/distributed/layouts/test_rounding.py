"""The same gradients give the same bits of bf16 weights and moments on real ranks, for any sharding."""

from typing import Any

import numpy as np
import pytest
import torch

from hlat.config.load import parse_recipe
from hlat.model import LocalParameter, local
from hlat.optim import build_optimizer
from hlat.parallel import build_parallel
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.random_keys import stream_key
from hlat.runtime.randomness import normal_block
from tests.support.distributed.jobs import Block, assemble
from tests.support.distributed.layouts import CASES, Case, recipe_content
from tests.support.distributed.workers import Pool

MODES = ("bf16-sr", "bf16-kahan")
STEPS = 3
_NAMES = (
    "TP2, q and k norms, odd vocabulary",
    "TP4 + SP, 2 kv heads",
    "DP2, ZeRO 1",
    "DP4, ZeRO 1",
    "DP2, ZeRO 3",
    "DP4, ZeRO 3",
    "DP4, ZeRO 3, an empty shard",
    "TP2 x DP2, ZeRO 3",
    "hybrid 2 x 2, ZeRO 3",
)


@torch.no_grad()
def _set_gradient(parameter: LocalParameter, step: int) -> None:
    """Set a gradient of normal values that depend only on the index in the canonical tensors."""
    parameter.parameter.grad = torch.zeros_like(parameter.parameter)
    gradient, layout = parameter.gradient, parameter.layout
    columns = layout.columns[0] if layout.columns else 1
    for run in layout.runs(parameter.first_row, parameter.first_row + gradient.shape[0]):
        key = stream_key(step, "test", run.name)
        size = layout.row_size or columns
        values = normal_block(key, run.canonical_start, run.count, size, layout.first_column, columns)
        gradient.narrow(0, run.start - parameter.first_row, run.count).copy_(values.view(run.count, *layout.columns))


def _blocks(parameters: list[LocalParameter], tensors: list[torch.Tensor]) -> list[Block]:
    """Collect the weights or states that a rank owns as blocks of canonical tensors, in fp32 (exact)."""
    found = []
    for parameter, tensor in zip(parameters, tensors, strict=True):
        for block in parameter.row_blocks():
            if parameter.owned and block.owned:
                values = torch.cat(parameter.row_views(block, tensor)).float().numpy()
                found.append((block.name, block.canonical_start, parameter.layout.first_column, values))
    return found


def step(runtime: Runtime, content: dict[str, Any], mode: str) -> dict[str, list[Block]]:
    """Take a few steps with given gradients; return weights and states. A job of the pool."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed, torch.bfloat16)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, mode, recipe.training.seed)
    for number in range(1, STEPS + 1):
        for parameter in model.local_parameters:
            _set_gradient(parameter, number)
        optimizer.set_learning_rate(0.01 / number)
        optimizer.step()
    states = optimizer.state_tensors(model.local_parameters) | {
        "weight": [local(parameter.parameter.detach()) for parameter in model.local_parameters]
    }
    assert all(tensor.dtype == torch.bfloat16 for tensors in states.values() for tensor in tensors)
    return {name: _blocks(model.local_parameters, tensors) for name, tensors in states.items()}


@pytest.mark.parametrize("mode", MODES)
def test_tensor_parallel_and_sharded_ranks_give_the_bits_of_one_process(pool: Pool, mode: str):
    cases = [case for case in CASES if case.name in _NAMES]
    assert len(cases) == len(_NAMES)
    known: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    for case in cases:
        key = repr(sorted(case.model.items()))
        if key not in known:
            known[key] = _assembled(pool, Case("one process", 1, {}, case.model), mode)
        found = _assembled(pool, case, mode)
        for kind, tensors in known[key].items():
            assert tensors.keys() == found[kind].keys()
            for name, values in tensors.items():
                assert np.array_equal(values, found[kind][name]), (case.name, kind, name)


def _assembled(pool: Pool, case: Case, mode: str) -> dict[str, dict[str, np.ndarray]]:
    ranks = pool.run(case.world, step, recipe_content(case), mode)
    return {kind: assemble([rank[kind] for rank in ranks]) for kind in ranks[0]}
