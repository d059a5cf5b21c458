"""With transfer, any layout trains the same model: multipliers are in the weights, and in the norm of the gradient."""

from typing import Any

import pytest
import torch

from hlat.config import parse_recipe
from hlat.ladder.coordinates import changes, measure, observe, random_batch, recipe_of_size
from hlat.optim import build_optimizer
from hlat.parallel import build_parallel
from hlat.runtime.distributed.join import Runtime
from hlat.training import accumulate_gradients, update
from tests.support.distributed.comparing import differences, reference, within_bounds
from tests.support.distributed.jobs import Block, assemble, blocks, train
from tests.support.distributed.layouts import CALM, NORMS_AFTER, ODD, TIED, Case, recipe_content
from tests.support.distributed.workers import Pool
from tests.support.model.families import load

TRANSFER = {"transfer": "completep", "base_hidden_size": 16, "base_layers": 2, "base_head_dim": 4}
SHORT = 4


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(Case("TP2 x PP2", 4, {"tensor": 2, "pipeline": 2}), "adamw", id="TP2 x PP2"),
        pytest.param(Case("PP2, tied", 2, {"pipeline": 2}, dict(TIED)), "adamw", id="PP2, tied"),
        pytest.param(Case("TP2, ZeRO 1", 2, {"tensor": 2}, dict(ODD)), "muon", id="TP2, norms of heads, muon"),
        pytest.param(
            Case("CP2, ZeRO 3", 2, {"context": 2, "zero": 3}, dict(NORMS_AFTER), lr=CALM), "adamw", id="CP2, ZeRO 3"
        ),
    ],
)
def test_any_layout_trains_the_same_model(case: Case, kind: str, pool: Pool) -> None:
    changes = {"optimizer": {"kind": kind, "lr": case.lr, "clip_norm": 0.3, **TRANSFER}}
    results = pool.run(case.world, train, recipe_content(case, **changes), SHORT, torch.float64)
    expected = reference(case, torch.float64, SHORT, **changes)
    assert within_bounds(differences(case, results, expected, torch.float64))


def trained(runtime: Runtime, content: dict[str, Any], steps: int) -> list[Block]:
    """Train on the batch of a coordinate check; return the weights that this rank owns."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, "fp32", 0, model.matrices)
    for step in range(1, steps + 1):
        update(model, optimizer, recipe, step, accumulate_gradients(model, random_batch(recipe)))
    return blocks(model.local_parameters)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_coordinates_of_a_layout_are_those_of_one_process(kind: str, pool: Pool) -> None:
    case = Case("TP2 x PP2", 4, {"tensor": 2, "pipeline": 2})
    base = parse_recipe(recipe_content(case, optimizer={"kind": kind, "lr": 4e-3, **TRANSFER}), world=4)
    recipe = recipe_of_size(base, 32, 4, 32)
    weights = assemble(pool.run(4, trained, recipe.model_dump(mode="json") | {"parallel": case.parallel}, SHORT))
    (decoder,) = build_parallel(recipe, Runtime(torch.device("cpu")), recipe.training.seed).stages
    batch = random_batch(recipe)
    before = observe(decoder, batch)
    load(decoder, {name: torch.from_numpy(each) for name, each in weights.items()})
    found = changes(before, [observe(decoder, batch)], batch)
    # measure() takes the mean logarithm over all steps: the last one is what remains of the others.
    total, earlier = measure(recipe, SHORT)[1], measure(recipe, SHORT - 1)[1]
    for name, value in found.items():
        last = total[name] ** SHORT / earlier[name] ** (SHORT - 1)
        # fp32 sums in another order, amplified where AdamW divides gradients near zero by themselves
        assert value == pytest.approx(last, rel=1e-3), name
