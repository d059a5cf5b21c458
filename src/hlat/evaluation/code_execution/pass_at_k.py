"""pass@k of generated programs (arXiv 2107.03374, equation 1): the probability that one of k samples passes the tests.

n samples, c of which pass -> 1 - C(n - c, k) / C(n, k), an unbiased estimate
"""

import math
from collections.abc import Sequence
from typing import Any

from hlat.evaluation.code_execution.sandbox import run_programs


def complete_programs(responses: Sequence[Sequence[str]], docs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Put the prompt of each document in front of its generated texts; a filter of lm-eval."""
    return [[doc["prompt"] + text for text in texts] for texts, doc in zip(responses, docs, strict=True)]


def pass_at_k(references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]) -> dict[str, float]:
    """Compute pass@k; a metric of lm-eval.

    Args:
        references: the tests of each problem.
        predictions: programs for each problem.
        k: numbers of samples, each at most the number of programs.

    Returns:
        Mean over the problems, by name, as in ``pass@1``.
    """
    passed = [run_programs(programs, tests=tests) for tests, programs in zip(references, predictions, strict=True)]
    return {
        f"pass@{count}": sum(estimate_pass(len(each), sum(each), count) for each in passed) / len(passed) for count in k
    }


def estimate_pass(samples: int, passing: int, k: int) -> float:
    """Estimate the probability that one of k samples passes."""
    return 1.0 - math.comb(samples - passing, k) / math.comb(samples, k)
