"""Computing the norm of the weights does not change later losses, gradient norms or clipping."""

from typing import Any

import pytest

from hlat.config.load import parse_recipe
from hlat.optim import build_optimizer
from hlat.parallel import build_parallel
from hlat.runtime.distributed.join import Runtime
from hlat.training import accumulate_gradients, update
from tests.support.distributed.jobs import batch_of
from tests.support.distributed.layouts import Case, recipe_content
from tests.support.distributed.workers import Pool


def numbers(runtime: Runtime, content: dict[str, Any], look: bool) -> list[tuple[float, float]]:
    """Train some steps; return loss and gradient norm of each. Compute the parameter norm after each step if asked."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer)
    found = []
    for step in range(1, 4):
        result = update(model, optimizer, recipe, step, accumulate_gradients(model, batch_of(model, recipe, step)))
        found.append((float(result.loss), float(result.gradient_norm)))
        if look:
            model.parameter_norm()
    return found


@pytest.mark.parametrize(
    "case",
    [Case("DP2, ZeRO 0", 2, {"zero": 0}), Case("CP2, ZeRO 0", 2, {"context": 2, "zero": 0}, micro_batch=8)],
    ids=str,
)
def test_computing_the_norm_of_the_weights_changes_nothing(pool: Pool, case: Case) -> None:
    """Without sharding the second rank owns no parameters; the zero sum of no tensors must not be a shared tensor."""
    content = recipe_content(case)
    looked_at = pool.run(case.world, numbers, content, True)
    assert looked_at == pool.run(case.world, numbers, content, False)
