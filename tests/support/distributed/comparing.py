"""How far a layout is from one process, and how far the order of additions explains.

The bound. A sum of n terms in arithmetic of unit roundoff u errs, whatever its order, by at most (n - 1) u times the
sum of their magnitudes, and with the random signs of rounding errors by about sqrt(n) u (Higham and Mary 2019: at most
6 sqrt(n) u in all but a part in 10^7 of cases). Two orders differ by at most twice that. n is the longest chain of
additions that a number passes through in a step: in each layer, forward and backward, the matrix products over the
hidden, inner and head sizes, attention over the sequence and the norms; the head over the vocabulary; and the sum over
the tokens of the batch. A step starts from weights that carry the differences of the steps before, so that after k
steps there are k of them, if a step does not magnify them. That it does not is checked with float64, where the same
differences are 2^29 times smaller and the same bound has to hold.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from hlat.config.load import parse_recipe
from hlat.runtime.distributed import Runtime
from tests.support.distributed.jobs import Trained, assemble, train
from tests.support.distributed.layouts import GLOBAL_BATCH, SEQUENCE_LENGTH, Case, recipe_content

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def chain(case: Case) -> int:
    """The longest chain of additions in a step."""
    model = parse_recipe(recipe_content(case), world=case.world).model
    layer = 2 * model.hidden_size + 2 * model.intermediate_size + 2 * SEQUENCE_LENGTH + 4 * model.n_head_dim
    return 2 * model.layers * layer + 2 * model.vocab_size + GLOBAL_BATCH * SEQUENCE_LENGTH


def bound(case: Case, dtype: torch.dtype, step: int) -> float:
    """Relative difference of two orders of addition after some steps."""
    return 2 * 6 * math.sqrt(chain(case)) * UNIT[dtype] * step


_references: dict[str, Trained] = {}


def reference(case: Case, dtype: torch.dtype, steps: int) -> Trained:
    """The same model in this process, alone, in one micro-batch."""
    alone = Case("one process", 1, {}, case.model, GLOBAL_BATCH)
    key = repr((sorted(case.model.items()), dtype, steps))
    if key not in _references:
        torch.set_num_threads(1)
        _references[key] = train(Runtime(torch.device("cpu")), recipe_content(alone), steps, dtype)
    return _references[key]


@dataclass(frozen=True)
class Difference:
    """A relative difference from one process, at the step where it is the largest share of its bound."""

    size: float
    bound: float


def differences(case: Case, parts: list[Trained], expected: Trained, dtype: torch.dtype) -> dict[str, Difference]:
    """How far what the ranks of a layout found is from one process; initial weights have to be the same bits."""
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
        "weights": Difference(apart / moved, bound(case, dtype, len(steps))),  # of the distance they have moved
        "validation": Difference(
            abs(parts[0].validation - expected.validation) / expected.validation, bound(case, dtype, len(steps))
        ),
        "parameter norm": Difference(norm, bound(case, dtype, len(steps))),
    }


def within_bounds(found: dict[str, Difference]) -> bool:
    """Whether the order of additions explains all of them."""
    return all(one.size <= one.bound for one in found.values())
