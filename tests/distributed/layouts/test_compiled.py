"""Compiled blocks in layouts whose blocks communicate: the gradients of one process, in one graph without a break."""

from typing import Any

import numpy as np
import pytest
import torch

from hlat.config.load import parse_recipe
from hlat.parallel import build_parallel
from hlat.runtime.distributed.join import Runtime
from hlat.training import accumulate_gradients
from tests.support.distributed.comparing import bound
from tests.support.distributed.jobs import Block, assemble, batch_of, blocks
from tests.support.distributed.layouts import CASES, Case, recipe_content
from tests.support.distributed.workers import Pool

QUICK = "TP2 + SP"
CHOSEN = (
    QUICK,
    "TP2",
    "CP2",
    "TP2 x CP2",
    "TP4 + SP, 2 kv heads, norms after",
    "TP2 + SP x PP2, sliding window",
    "TP2 x DP2, ZeRO 3",
)


def compiled_gradients(runtime: Runtime, content: dict[str, Any]) -> tuple[list[Block], int, int]:
    """Compute this rank's blocks of the gradient of a batch; also count graphs, and breaks of graphs."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed, torch.float64)
    accumulate_gradients(model, batch_of(model, recipe, 1))
    return (
        blocks(model.local_parameters, gradients=True),
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
    )


def eager_gradients(runtime: Runtime, content: dict[str, Any]) -> list[Block]:
    """Compute the gradient of one process."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed, torch.float64)
    accumulate_gradients(model, batch_of(model, recipe, 1))
    return blocks(model.local_parameters, gradients=True)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.name == QUICK else pytest.mark.slow, id=case.name)
        for case in CASES
        if case.name in CHOSEN
    ],
)
def test_compiled_blocks_that_communicate_have_the_gradients_of_one_process(case: Case, pool: Pool) -> None:
    """The bound is that of the same layout uncompiled: the compiler changes the order of sums as a layout does."""
    content = recipe_content(case)
    found = pool.run(case.world, compiled_gradients, content | {"run": {"compile": "blocks"}})
    assert [(graphs, breaks) for _, graphs, breaks in found] == [(1, 0)] * case.world
    [alone] = pool.run(1, eager_gradients, content | {"parallel": {}})
    expected, limit = assemble([alone]), bound(case, torch.float64, 1)
    parts = assemble([of_rank for of_rank, _, _ in found])
    wrong = {
        name: distance
        for name, values in expected.items()
        if (distance := float(np.linalg.norm(parts[name] - values) / np.linalg.norm(values))) > limit
    }
    assert parts.keys() == expected.keys() and not wrong


def test_the_cases_are_those_that_are_named() -> None:
    assert {case.name for case in CASES} >= set(CHOSEN)
