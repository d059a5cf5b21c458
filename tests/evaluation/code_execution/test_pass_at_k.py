"""pass@k is the estimate of its definition."""

import itertools

import pytest

from hlat.evaluation.code_execution.sandbox import estimate_pass


def test_pass_at_k_is_the_share_of_samples_of_k_programs_with_one_that_passes() -> None:
    for passing in range(6):
        outcomes = [index < passing for index in range(5)]
        for k in (1, 2, 5):
            chosen = list(itertools.combinations(outcomes, k))
            assert estimate_pass(5, passing, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
