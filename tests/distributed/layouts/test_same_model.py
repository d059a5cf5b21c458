"""Law 2: a recipe trains the same model in any layout, up to the order of floating-point summation."""

from typing import Any

import pytest
import torch

from tests.support.distributed.comparing import differences, reference, within_bounds
from tests.support.distributed.jobs import train
from tests.support.distributed.layouts import CASES, GLOBAL_BATCH, SOME, STEPS, USUAL, Case, recipe_content
from tests.support.distributed.workers import Pool


def check(pool: Pool, case: Case, dtype: torch.dtype, steps: int, **changes: Any) -> None:
    """Compare a layout, with changes that must not matter, with the plain model in one process."""
    results = pool.run(case.world, train, recipe_content(case, **changes), steps, dtype)
    found = differences(case, results, reference(case, dtype, steps), dtype)
    assert within_bounds(found), found


SHORT = 4  # steps of layouts in the default suite; all layouts run in the slow suite, for more
LONG = [case for case in SOME if case.world == 2]  # compared for many steps in the default suite too


def in_every_run(*cases: Case) -> pytest.MarkDecorator:
    """All layouts; those that are not among these are in the slow suite."""
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=str(case), marks=() if case in cases else pytest.mark.slow) for case in CASES]
    )


@in_every_run(*LONG)
def test_any_layout_trains_the_same_model_for_many_steps(case: Case, pool: Pool) -> None:
    check(pool, case, torch.float32, STEPS)


@in_every_run(*USUAL)
def test_in_float64_differences_are_roundings_of_float64(case: Case, pool: Pool) -> None:
    """Any term omitted, counted twice or rounded to float32 would exceed this bound a million times."""
    check(pool, case, torch.float64, SHORT)


VARIANTS = {
    "coalescing off": {"model": {"coalesce": False}},
    "activation checkpointing": {"memory": {"activation_checkpointing": "full"}},
}
VARIED = {("TP4 + SP, 2 kv heads", "coalescing off"), ("PP2 zbv", "activation checkpointing")}  # in every run


@pytest.mark.parametrize(
    ("case", "variant"),
    [
        pytest.param(case, name, id=f"{case}-{name}", marks=() if (case.name, name) in VARIED else pytest.mark.slow)
        for case in SOME
        for name in VARIANTS
    ],
)
def test_coalescing_and_checkpointing_change_nothing(case: Case, variant: str, pool: Pool) -> None:
    check(pool, case, torch.float32, SHORT, **VARIANTS[variant])


@pytest.mark.parametrize("name", ["TP4 + SP, q and k norms, odd vocabulary", "PP2 zbv"])
def test_the_z_loss_of_a_layout_is_that_of_one_process(name: str, pool: Pool) -> None:
    """The sum of exponentials is over the complete vocabulary, although each rank has some of its rows."""
    (case,) = (case for case in CASES if case.name == name)
    content = recipe_content(case, optimizer={"z_loss": 0.1})
    alone = {**content, "parallel": {}, "batch": {"global_batch": GLOBAL_BATCH, "micro_batch": GLOBAL_BATCH}}
    [expected] = pool.run(1, train, alone, SHORT)
    found = differences(case, pool.run(case.world, train, content, SHORT), expected, torch.float32)
    assert within_bounds(found), found
    without = reference(case, torch.float32, SHORT)
    assert (
        expected.losses[0] == without.losses[0] and abs(expected.gradient_norms[0] - without.gradient_norms[0]) > 1e-3
    )


RAMP = [{"tokens": 65, "global_batch": 2}, {"tokens": 100, "global_batch": 4}]  # 2 steps of 2, 1 of 4, then 8
RAMPED = ("PP2 gpipe", "PP2 1f1b", "PP2 zbv", "DP2, ZeRO 3", "PP2 interleaved-zero-bubble", "PP2 x DP2, ZeRO 3")


@pytest.mark.parametrize("name", RAMPED)
def test_a_batch_ramp_in_a_layout_is_that_of_one_process(name: str, pool: Pool) -> None:
    """Pipelines get a schedule for each number of micro-batches; ZeRO and accumulation count them anew each step."""
    (case,) = (case for case in CASES if case.name == name)
    batch = {"global_batch": GLOBAL_BATCH, "micro_batch": 1}
    if case.name == "PP2 x DP2, ZeRO 3":  # two micro-batches for each pipeline
        ramp, steps = [RAMP[1]], 4
    else:
        ramp, steps = RAMP, 5
    content = recipe_content(case, batch={**batch, "ramp": ramp})
    alone = {**content, "parallel": {}, "batch": {**batch, "micro_batch": ramp[0]["global_batch"], "ramp": ramp}}
    [expected] = pool.run(1, train, alone, steps, torch.float64)
    found = differences(case, pool.run(case.world, train, content, steps, torch.float64), expected, torch.float64)
    assert within_bounds(found), found


@pytest.mark.parametrize("case", SOME, ids=str)
def test_in_mixed_precision_layouts_differ_by_at_most_twice_the_rounding_of_bf16(case: Case, pool: Pool) -> None:
    """Both runs round the same matrix products to bf16, so they differ by at most two such rounding errors."""
    mixed = {"precision": {"mode": "mixed"}}
    [found, *_] = pool.run(case.world, train, recipe_content(case, **mixed), SHORT)
    [alone] = pool.run(1, train, recipe_content(case, **mixed) | {"parallel": {}}, SHORT)
    wide = reference(case, torch.float32, SHORT)
    noise = max(abs(a - b) for a, b in zip(alone.losses, wide.losses, strict=True))
    apart = max(abs(a - b) for a, b in zip(found.losses, alone.losses, strict=True))
    assert 0 < noise < 0.05 and apart <= 2 * noise
