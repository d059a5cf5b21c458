"""The order of two layouts of one job: planted errors give the ratio from which four of five pairs are right."""

import numpy as np
import pytest

from published_runs.order import PairErrors


def planted(deviation: float, sources: int = 40, jobs: int = 25) -> PairErrors:
    """Jobs of two layouts each; times of either differ by normal errors, and by up to 30 % on purpose."""
    random = np.random.default_rng(0)
    names = [(f"s{source}", job) for source in range(sources) for job in range(jobs) for _ in range(2)]
    predicted = np.exp(random.uniform(0, 0.3, len(names)))
    return PairErrors(np.exp(random.normal(0, deviation, len(names))), predicted, names)


def test_the_ratio_is_the_quantile_of_planted_errors() -> None:
    """Differences of two normal errors of 0.1: 60 % are within 0.8416 x 0.1 x sqrt(2) of 0.

    The level is 0.6 x 41 / 40 = 0.615, whose quantile is 0.869 deviations. A thousand pairs place it within
    sqrt(0.615 x 0.385 / 1000) / density(0.869) = 0.0154 / 0.547 = 0.028 deviations of it; three such are allowed.
    """
    errors = planted(0.1)
    assert errors.pairs == 1000 and errors.sources == 40
    assert np.log(errors.undecided_ratio()) == pytest.approx(0.869 * 0.1 * 2**0.5, abs=3 * 0.028 * 0.1 * 2**0.5)


def test_four_of_five_pairs_at_the_ratio_are_right() -> None:
    """4,000 new pairs, predicted to differ by the ratio: at least 0.8 are in the right order.

    The standard error of the share is sqrt(0.8 x 0.2 / 4000) = 0.0063; three such are allowed. Pairs below the ratio
    are right less often, those above more often.
    """
    gap = np.log(planted(0.1).undecided_ratio())
    measured = gap + np.random.default_rng(1).normal(0, 0.1 * 2**0.5, 4000)
    assert (measured > 0).mean() >= 0.8 - 3 * 0.0063
    below, above = planted(0.1).ordered()
    assert below is not None and above is not None and below < 0.8 < above


def test_only_layouts_of_one_job_are_paired() -> None:
    errors = PairErrors(np.exp([0.5, -0.5, 0.1]), np.ones(3), [("a", "7B"), ("a", "13B"), ("b", "7B")])
    assert (errors.pairs, errors.undecided_ratio(), errors.ordered()) == (0, 1.0, (None, None))


def test_errors_that_a_job_shares_do_not_count() -> None:
    """Both layouts 50 % slower than predicted: their ratio is right."""
    errors = PairErrors(np.full(2, 1.5), np.array([1.0, 1.2]), [("a", "7B"), ("a", "7B")])
    assert errors.undecided_ratio() == pytest.approx(1.0) and errors.ordered() == (None, 1.0)
