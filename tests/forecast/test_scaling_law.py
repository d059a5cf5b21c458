"""The scaling law and its optima: against a search over a grid, and against what the papers say."""

import numpy as np
import pytest

from hlat.forecast import CHINCHILLA, ScalingLaw
from hlat.model.counts import count_parameters
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.problem.request import resolve_request
from hlat.planner.problem.shapes import llama_class, llama_class_shapes, nearest_shape
from tests.support.planner.requests import request_for

SARDANA = ScalingLaw(1.69, 406.4, 410.7, 0.336, 0.283)
"""The constants of Hoffmann et al. before they were rounded to two digits, which Sardana et al. use."""


def tokens_for(law: ScalingLaw, loss: float, sizes: np.ndarray) -> np.ndarray:
    """Tokens with which models of some sizes reach a loss; infinite for those that are too small."""
    rest = loss - law.irreducible - law.a / sizes**law.alpha
    return np.where(rest > 0, (law.b / np.maximum(rest, 1e-12)) ** (1 / law.beta), np.inf)


@pytest.mark.parametrize("flops", [1e20, 1e22, 1e24])
def test_no_other_size_has_less_loss_for_the_same_compute(flops: float) -> None:
    size, tokens = CHINCHILLA.optimal_size(flops)
    assert 6 * size * tokens == pytest.approx(flops)
    sizes = size * np.geomspace(0.1, 10, 4001)  # steps of a tenth of a percent
    losses = [CHINCHILLA.loss(one, flops / 6 / one) for one in sizes]
    assert sizes[int(np.argmin(losses))] == pytest.approx(size, rel=1.5e-3)


@pytest.mark.parametrize("generated", [1e11, 1e12, 1e14])
def test_no_other_size_of_that_loss_trains_and_generates_for_less(generated: float) -> None:
    size, tokens = CHINCHILLA.optimal_size(1e22, generated)
    sizes = size * np.geomspace(0.2, 5, 4001)
    total = 6 * sizes * (tokens_for(CHINCHILLA, CHINCHILLA.loss(size, tokens), sizes) + generated / 3)
    assert sizes[int(np.argmin(total))] == pytest.approx(size, rel=2e-3)


def test_chinchilla_is_compute_optimal_by_its_own_law() -> None:
    """70 billion parameters and 1.4 trillion tokens for Gopher's 5.76e23 FLOPs: Besiroglu's fit is within a tenth."""
    size, tokens = CHINCHILLA.optimal_size(5.76e23)
    assert size == pytest.approx(70e9, rel=0.1) and tokens == pytest.approx(1.4e12, rel=0.1)


def test_the_example_of_sardana_et_al() -> None:
    """Figure 1: a model of 7B instead of 13B of the same quality saves 1.7e22 FLOPs, 17 %, with 2T tokens generated."""
    low, high = 1e20, 1e26
    while high / low > 1 + 1e-9:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if SARDANA.optimal_size(middle)[0] < 13e9 else (low, middle)
    size, tokens = SARDANA.optimal_size(low)
    small = tokens_for(SARDANA, SARDANA.loss(size, tokens), np.array([7e9]))[0]
    before, after = (6 * n * d + 2 * n * 2e12 for n, d in ((size, tokens), (7e9, small)))
    assert before - after == pytest.approx(1.7e22, rel=0.03)
    assert 1 - after / before == pytest.approx(0.17, abs=0.005)


def test_more_generated_tokens_want_smaller_models() -> None:
    sizes = [CHINCHILLA.optimal_size(1e22, generated)[0] for generated in (0.0, 1e10, 1e11, 1e12, 1e13)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)


def test_every_shape_is_found_by_its_name_and_counted_as_named() -> None:
    for size, section in llama_class_shapes():
        name, found, parameters = nearest_shape(size)
        assert (found, parameters) == (section, size) and llama_class(name) == section
        assert found["hidden_size"] % found["heads"] == 0 and found["heads"] % found["kv_heads"] == 0
    request = request_for("llama-class-8.03b", "h100:1")
    assert count_parameters(request.model).total == count_parameters(request_for("llama-3-8b", "h100:1").model).total
    assert llama_class("llama-3-8b") is None and llama_class("llama-class-0b") is None


def test_the_shape_of_llama_3_8b_is_among_them() -> None:
    """Table 3 of the Llama 3 paper: 32 layers of 4,096, 32 heads, 8 kv heads, 14,336 wide."""
    section = llama_class("llama-class-8b")
    assert section is not None
    ours = resolve_request(PlanQuestion("llama-class-8b"), request_for().cluster).model
    theirs = resolve_request(PlanQuestion("llama-3-8b"), request_for().cluster).model
    names = ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "vocab_size", "tie_embeddings")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
