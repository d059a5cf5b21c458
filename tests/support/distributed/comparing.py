"""Differences between a layout and one process, and the bound that the order of summation explains.

A sum of n terms in arithmetic of unit roundoff u has, in any order, an error of at most (n - 1) u times the sum of the
magnitudes, and with random signs of rounding errors about sqrt(n) u (Higham and Mary 2019: at most 6 sqrt(n) u except
for a fraction of 10^-7 of cases). Two orders differ by at most twice that. Here n is the longest chain of additions of
a step: in each layer, forward and backward, the matrix products over hidden, intermediate and head sizes, attention
over the sequence and the norms; the head over the vocabulary; and the sum over the tokens of the batch. A step starts
from weights that have the differences of the steps before, so that after k steps the bound is k times as large, if a
step does not amplify differences. Comparison in float64 checks that it does not: there the same differences are 2^29
times smaller, and the same formula has to hold.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hlat.config.load import parse_recipe
from hlat.runtime.distributed.join import Runtime
from tests.support.distributed.jobs import Trained, assemble, train
from tests.support.distributed.layouts import GLOBAL_BATCH, SEQUENCE_LENGTH, Case, recipe_content

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def chain(case: Case) -> int:
    """Return the length of the longest chain of additions in a step."""
    model = parse_recipe(recipe_content(case), world=case.world).model
    layer = 2 * model.hidden_size + 2 * model.intermediate_size + 2 * SEQUENCE_LENGTH + 4 * model.n_head_dim
    return 2 * model.layers * layer + 2 * model.vocab_size + GLOBAL_BATCH * SEQUENCE_LENGTH


def bound(case: Case, dtype: torch.dtype, step: int) -> float:
    """Bound of the relative difference between two orders of summation after some steps."""
    return 2 * 6 * math.sqrt(chain(case)) * UNIT[dtype] * step


_references: dict[str, Trained] = {}


def reference(case: Case, dtype: torch.dtype, steps: int, **changes: Any) -> Trained:
    """Train the same model in this process, with one micro-batch per step; ``changes`` as for ``recipe_content``."""
    alone = Case("one process", 1, {}, case.model, GLOBAL_BATCH, case.lr)
    key = repr((sorted(case.model.items()), case.lr, dtype, steps, changes))
    if key not in _references:
        torch.set_num_threads(1)
        _references[key] = train(Runtime(torch.device("cpu")), recipe_content(alone, **changes), steps, dtype)
    return _references[key]


@dataclass(frozen=True)
class Difference:
    """Largest relative difference from one process, in units of its bound."""

    size: float
    bound: float


def differences(case: Case, parts: list[Trained], expected: Trained, dtype: torch.dtype) -> dict[str, Difference]:
    """Compare the results of the ranks of a layout with one process; initial weights must have the same bits."""
    for part in parts:
        assert (part.losses, part.gradient_norms) == (parts[0].losses, parts[0].gradient_norms), "all ranks know them"
        assert part.validation == parts[0].validation
    initial, same = assemble([part.initial for part in parts]), assemble([expected.initial])
    assert initial.keys() == same.keys()
    assert all(np.array_equal(initial[name], same[name]) for name in same), "initial weights, bit for bit"
    final, wanted = assemble([part.final for part in parts]), assemble([expected.final])
    steps = range(1, len(expected.losses) + 1)

    def worst(found: list[float], right: list[float]) -> Difference:
        each = [
            Difference(abs(a - b) / abs(b), bound(case, dtype, step))
            for a, b, step in zip(found, right, steps, strict=True)
        ]
        return max(each, key=lambda one: one.size / one.bound)

    moved = math.sqrt(sum(float(((wanted[name] - same[name]) ** 2).sum()) for name in wanted))
    apart = math.sqrt(sum(float(((wanted[name] - final[name]) ** 2).sum()) for name in wanted))
    norm = abs(parts[0].parameter_norm - expected.parameter_norm) / expected.parameter_norm
    return {
        "loss": worst(parts[0].losses, expected.losses),
        "gradient norm": worst(parts[0].gradient_norms, expected.gradient_norms),
        "weights": Difference(apart / moved, bound(case, dtype, len(steps))),  # relative to the change of the weights
        "validation": Difference(
            abs(parts[0].validation - expected.validation) / expected.validation, bound(case, dtype, len(steps))
        ),
        "parameter norm": Difference(norm, bound(case, dtype, len(steps))),
    }


def within_bounds(found: dict[str, Difference]) -> bool:
    """Return True if all differences are within their bounds."""
    return all(one.size <= one.bound for one in found.values())
