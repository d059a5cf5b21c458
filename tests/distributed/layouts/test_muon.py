"""Muon in any layout: equal gradients give equal bits; training equals that of one process up to summation order."""

from typing import Any

import numpy as np
import pytest
import torch

from hlat.config.load import parse_recipe
from hlat.model import local
from hlat.optim import build_optimizer
from hlat.parallel import build_parallel
from hlat.runtime.distributed.join import Runtime
from tests.distributed.layouts.test_rounding import STEPS, _blocks, _set_gradient
from tests.support.distributed.comparing import differences, reference
from tests.support.distributed.jobs import Block, assemble, train
from tests.support.distributed.layouts import CASES, Case, recipe_content
from tests.support.distributed.workers import Pool

MUON = {"optimizer": {"kind": "muon", "lr": 3e-3}}
SHORT = 4
_QUICK = ("TP4 + SP, 2 kv heads", "DP2, ZeRO 3", "TP2 x PP2 x DP2, ZeRO 1", "CP2, ZeRO 0", "hybrid 2 x 2, ZeRO 3")
CASE_PARAMETERS = [
    pytest.param(case, id=str(case), marks=() if case.name in _QUICK else pytest.mark.slow) for case in CASES
]


def step(runtime: Runtime, content: dict[str, Any]) -> dict[str, list[Block]]:
    """Take a few steps with given gradients; return weights and states. A job of the pool."""
    recipe = parse_recipe(content, world=runtime.world)
    mode, seed = recipe.precision.mode, recipe.training.seed
    model = build_parallel(recipe, runtime, seed)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, mode, seed, model.matrices)
    for number in range(1, STEPS + 1):
        for parameter in model.local_parameters:
            _set_gradient(parameter, number)
        optimizer.set_learning_rate(0.01 / number)
        optimizer.step()
    weights = [local(parameter.parameter.detach()) for parameter in model.local_parameters]
    states = optimizer.state_tensors(model.local_parameters) | {"weight": weights}
    return {
        name: _blocks(*zip(*_existing(model.local_parameters, tensors), strict=True))
        for name, tensors in states.items()
    }


def _existing(parameters: list[Any], tensors: list[Any]) -> list[tuple[Any, Any]]:
    return [(each, tensor) for each, tensor in zip(parameters, tensors, strict=True) if tensor is not None]


_alone: dict[str, dict[str, dict[str, np.ndarray]]] = {}


@pytest.mark.parametrize("mode", ["bf16-sr", "mixed"])
@pytest.mark.parametrize("case", CASE_PARAMETERS)
def test_equal_gradients_give_the_bits_of_one_process(case: Case, mode: str, pool: Pool) -> None:
    """Newton-Schulz runs on the same whole matrix with the same shape, wherever its owner is."""
    changes = MUON | {"precision": {"mode": mode}}
    key = repr((mode, sorted(case.model.items())))
    if key not in _alone:
        [alone] = pool.run(1, step, recipe_content(Case("one process", 1, {}, case.model), **changes))
        _alone[key] = {kind: assemble([blocks]) for kind, blocks in alone.items()}
    ranks = pool.run(case.world, step, recipe_content(case, **changes))
    assert set(ranks[0]) == {"weight", "momentum", "exp_avg", "exp_avg_sq"}
    for kind, tensors in _alone[key].items():
        found = assemble([rank[kind] for rank in ranks])
        assert tensors.keys() == found.keys()
        for name, values in tensors.items():
            # torch's fused AdamW rounds the last elements of a tensor differently from vectors of eight: 2 roundings
            if mode == "mixed" and not ("momentum" in kind or _is_hidden(name)):
                np.testing.assert_allclose(values, found[name], rtol=STEPS * 2.0**-22, atol=1e-9)
            else:
                assert np.array_equal(values, found[name]), (kind, name)


def _is_hidden(name: str) -> bool:
    return "_proj.weight" in name


AMPLIFICATION = 3.4445**5
"""Largest factor by which Newton-Schulz amplifies a relative difference: its slope at 0, in each of five steps.

A direction has the norm 1, an update at least 0.65 sqrt(rank), so this is an upper bound of the relative difference of
the updates for one of the directions. Everything else is as with AdamW (``comparing.py``)."""


@pytest.mark.parametrize("case", CASE_PARAMETERS)
def test_any_layout_trains_the_same_model(case: Case, pool: Pool) -> None:
    """In float64: any wrong row, owner or scale would exceed the bound a million times."""
    results = pool.run(case.world, train, recipe_content(case, **MUON), SHORT, torch.float64)
    expected = reference(case, torch.float64, SHORT, **MUON)
    found = differences(case, results, expected, torch.float64)
    assert all(one.size <= AMPLIFICATION * one.bound for one in found.values()), found
