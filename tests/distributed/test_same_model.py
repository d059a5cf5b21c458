"""Law 2: the same recipe in any layout is the same model, up to the order of floating-point additions."""

from typing import Any

import pytest
import torch
from comparing import differences, reference, within_bounds
from jobs import train
from layouts import CASES, STEPS, Case, recipe_content
from workers import Pool


def check(pool: Pool, case: Case, dtype: torch.dtype, steps: int, **changes: Any) -> None:
    """A layout, with changes that must change nothing, against the plain model in one process."""
    parts = pool.run(case.world, train, recipe_content(case, **changes), steps, dtype)
    found = differences(case, parts, reference(case, dtype, steps), dtype)
    assert within_bounds(found), found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_layout_is_the_same_model(case: Case, pool: Pool) -> None:
    check(pool, case, torch.float32, STEPS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_float64_the_differences_are_those_of_float64(case: Case, pool: Pool) -> None:
    """Whatever is left out, counted twice or rounded to float32 on the way is a million times above this bound."""
    check(pool, case, torch.float64, 3)


# One of each kind in every run; all of them before a change of this room lands.
SOME = ("TP4 + SP, 2 kv heads", "PP2 zbv", "DP2, ZeRO 3", "CP2", "TP2 x PP2 x DP2, ZeRO 1")
VARIANTS = {
    "coalescing off": {"model": {"coalesce": False}},
    "activation checkpointing": {"memory": {"activation_checkpointing": "full"}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in SOME], ids=str)
def test_coalescing_and_checkpointing_change_nothing(case: Case, variant: str, pool: Pool) -> None:
    check(pool, case, torch.float32, STEPS, **VARIANTS[variant])


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_coalescing_and_checkpointing_change_nothing_in_any_layout(case: Case, variant: str, pool: Pool) -> None:
    check(pool, case, torch.float32, STEPS, **VARIANTS[variant])
