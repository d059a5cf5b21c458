"""Attention within documents gives the result of each document alone, in any layout and with any recomputation.

The reference runs every document of a batch alone through the plain model. In float64 the remaining difference is the
order of summation: chains of a few hundred terms with errors of 2^-53, about 1e-14 of a gradient. The bound of 1e-9 is
far above that, and far below the effect of a token of another document.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hlat.config import Recipe
from hlat.config.load import parse_recipe
from hlat.model import IGNORED
from hlat.parallel import ParallelModel, build_parallel
from hlat.runtime.distributed.join import Runtime
from hlat.training import accumulate_gradients
from tests.distributed.memory.test_activation_checkpointing import POLICIES, content_of
from tests.support.distributed.jobs import Block, assemble, batch_of, blocks, documents, validate
from tests.support.distributed.layouts import CASES, GLOBAL_BATCH, SEQUENCE_LENGTH, Case, recipe_content
from tests.support.distributed.workers import Pool

WITHIN = 1e-9
CPU = torch.device("cpu")
SHARP = {"model": {"init_std": 0.2}}  # large weights make attention far from uniform, so that the mask matters
ISOLATED = {"data": {"isolate": True}, **SHARP}


@dataclass
class Passed:
    """Results of one rank for one batch."""

    loss: float
    validation: float
    gradients: list[Block]


def passed(runtime: Runtime, content: dict[str, object]) -> Passed:
    """Run one batch on a rank; a job of the pool."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed, torch.float64)
    term = accumulate_gradients(model, batch_of(model, recipe, 1))
    loss = float(model.sum_over_world(term.reshape(1)))
    gradients = blocks(model.local_parameters, gradients=True)
    return Passed(loss, validate(model, recipe), gradients)


_alone: dict[str, Passed] = {}


def alone(case: Case) -> Passed:
    """Compute the same with the plain model, one document at a time; cached per model."""
    key = repr(sorted(case.model.items()))
    if key not in _alone:
        _alone[key] = _one_at_a_time(case)
    return _alone[key]


def _one_at_a_time(case: Case) -> Passed:
    content = recipe_content(Case("one process", 1, {}, case.model, GLOBAL_BATCH), **SHARP)
    recipe = parse_recipe(content, world=1)
    model = build_parallel(recipe, Runtime(CPU), recipe.training.seed, torch.float64)
    tokens = int((batch_of(model, recipe, 1).labels_BS != IGNORED).sum())
    with torch.no_grad():
        validation = sum(float(result) for result in _each(model, recipe, 0))
    loss = 0.0
    for result in _each(model, recipe, 1):
        (result / tokens).backward()
        loss += float(result.detach()) / tokens
    return Passed(loss, validation, blocks(model.local_parameters, gradients=True))


def _each(model: ParallelModel, recipe: Recipe, step: int) -> Iterator[torch.Tensor]:
    """Iterate over the summed losses of the documents of a step."""
    batch, (stage,) = batch_of(model, recipe, step), model.stages
    for row, lengths in enumerate(documents(step, GLOBAL_BATCH, SEQUENCE_LENGTH)):
        ends = np.cumsum(lengths).tolist()
        for start, stop in zip([0, *ends], ends, strict=False):
            yield stage(batch.inputs_BS[row : row + 1, start:stop], batch.labels_BS[row : row + 1, start:stop])


def check(results: list[Passed], expected: Passed) -> None:
    for result in results:
        assert abs(result.loss - expected.loss) <= WITHIN * expected.loss
        assert abs(result.validation - expected.validation) <= WITHIN * expected.validation
    ours, theirs = assemble([result.gradients for result in results]), assemble([expected.gradients])
    assert ours.keys() == theirs.keys()
    for name, right in theirs.items():
        assert np.linalg.norm(ours[name] - right) <= WITHIN * np.linalg.norm(right), name


ONE = Case("one process", 1, {})
_NAMES = (
    *("TP2 + SP", "TP2", "TP4 + SP, q and k norms, odd vocabulary", "CP2", "CP4", "TP2 x CP2", "DP2, ZeRO 3"),
    *("PP2 gpipe", "PP2 1f1b", "PP2 interleaved-1f1b", "PP2 interleaved-zero-bubble", "PP2 zbv"),
    *("PP2, tied", "PP2 x CP2 x DP2, ZeRO 1", "TP2 x PP2 x DP2, ZeRO 1"),
)
LAYOUTS = [ONE, *(case for case in CASES if case.name in _NAMES)]
CHECKPOINTED = [case for case in LAYOUTS if case.name in ("one process", "TP2 + SP", "CP2", "PP2 zbv")]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_in_any_layout_documents_are_independent(case: Case, pool: Pool) -> None:
    check(pool.run(case.world, passed, recipe_content(case, **ISOLATED)), alone(case))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CHECKPOINTED, ids=str)
def test_with_any_recomputation_documents_are_independent(case: Case, policy: str, pool: Pool) -> None:
    check(pool.run(case.world, passed, content_of(case, policy, **ISOLATED)), alone(case))


def test_without_isolation_results_differ() -> None:
    """The comparison above can fail: without isolation the difference is a million times the bound."""
    joined, apart = passed(Runtime(CPU), recipe_content(ONE, **SHARP)), alone(ONE)
    assert abs(joined.loss - apart.loss) > 1e6 * WITHIN * apart.loss
    assert abs(joined.validation - apart.validation) > 1e6 * WITHIN * apart.validation
