"""Refusals of a ladder, and the further run that it proposes."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from hlat.forecast import Observation, ScalingLaw, fit_range
from hlat.forecast.design import best_next_run, check_design
from hlat.runtime.errors import PlanError
from tests.forecast.ladders import SIZES, TOKENS, ladder_of, observations

TARGET = 1.5e9, 6e10


@pytest.mark.parametrize(
    "runs, reasons",
    [
        (observations()[:3], ["3 finished runs, and needs 5; train 2 more", "have 1 sizes .* and it needs 3"]),
        ([run for run in observations() if run.size in SIZES[:2]], ["2 sizes .* train runs of 1 more"]),
        ([Observation(size, 1e9, 3.0) for size in (1e6, 2e6, 4e6, 8e6, 2e7)], ["1 counts of tokens .* needs 2"]),
        ([Observation(1e6 * (1 + n / 100), 1e8 * 2**n, 3.0) for n in range(6)], ["1 sizes that are a factor of 1.1"]),
        ([*observations(), Observation(1e6, 1e8, math.nan)], ["1 of its runs have a size, tokens or loss"]),
    ],
)
def test_a_design_that_determines_no_law_is_refused(runs: list[Observation], reasons: list[str]) -> None:
    for reason in reasons:
        with pytest.raises(PlanError, match=reason):
            check_design(runs)


def test_a_ladder_refuses_through_its_fit() -> None:
    with pytest.raises(PlanError, match="needs 5"):
        ladder_of(observations()[::5][:4]).forecast({"total": 1e9, "non_embedding": 1e9, "flops": 1e9}, 10**10)


@pytest.mark.parametrize(("size", "apart"), [(1e9, r"by a factor of [2-9]\.\d"), (1e11, "without bound")])
def test_a_range_that_says_nothing_is_refused_with_a_run_that_would_help(size: float, apart: str) -> None:
    """The wider one reaches below the irreducible loss."""
    ladder = ladder_of([run for run in observations(noise=0.02) if run.tokens <= 4e8 and run.size <= 5e7])
    with pytest.raises(PlanError, match=rf"differ {apart}, .*A run with .* make the range about \d+% narrow"):
        ladder.forecast({"total": size, "non_embedding": size, "flops": size}, int(100 * size))


def test_the_effect_of_a_further_run_is_that_of_a_fit_with_it() -> None:
    """Fit again with the run, whose loss is that of the law, and compare the spread of the samples."""
    runs = observations(noise=0.002, seed=2)
    fit = fit_range(runs, samples=500)

    def spread(laws: Sequence[ScalingLaw]) -> float:
        return math.hypot(float(np.std(np.log([law.loss(*TARGET) for law in laws]))), fit.noise)

    for run in ((1.5e8, 2.5e10), (6e8, 6e9)):
        again = fit_range([*runs, Observation(*run, fit.law.loss(*run))], samples=500)
        # A standard deviation of 500 samples has a relative error of 1 / sqrt(1000) = 3.2 %, and there are two. The
        # second fit has one residual more, 0, so that its noise is 1 / 26 smaller: a tenth in all.
        assert fit.narrowing(run, TARGET) == pytest.approx(spread(again.samples) / spread(fit.samples), rel=0.1)


def test_the_run_proposed_is_the_cheapest_of_the_best() -> None:
    runs = observations(noise=0.003)
    fit = fit_range(runs)
    candidates = [(size, tokens) for size in SIZES for tokens in TOKENS]
    effects = {pair: fit.narrowing(pair, TARGET) for pair in candidates}
    most = 1 - min(effects.values())
    good = [pair for pair in candidates if 1 - effects[pair] >= 0.9 * most]
    found = best_next_run(fit, runs, TARGET, candidates)
    assert (found.size, found.tokens) == min(good, key=lambda pair: pair[0] * pair[1])
    assert found.flops == 6 * found.size * found.tokens and found.narrowing == effects[found.size, found.tokens]
    own = best_next_run(fit, runs, TARGET)
    assert own.narrowing < 1 and own.flops <= 6 * max(SIZES) * max(TOKENS)


def test_a_ladder_proposes_a_run_by_its_own_count_of_sizes() -> None:
    ladder = ladder_of(observations(noise=0.003))
    target = {"total": 1e9, "non_embedding": 1e9, "flops": 1e9}
    assert ladder.next_run(target, 1e10, [(target, 1e9)])[:2] == (1e9, 1e9)
