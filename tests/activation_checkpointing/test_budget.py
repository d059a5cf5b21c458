"""The budget solver finds the cheapest recomputation that fits; if nothing fits, the error suggests a budget."""

from collections import Counter
from itertools import combinations_with_replacement
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.activation_checkpointing import POLICIES, plan_activations
from hlat.activation_checkpointing.plan import ActivationPlan, BlockPolicy, cheapest
from hlat.config import Recipe, RecipeError
from hlat.config.load import parse_recipe
from hlat.model import ModelShard
from hlat.model.activations import activation_bytes
from hlat.model.spec import FULL_MODEL
from tests.support.activation_checkpointing.small import BASE, BATCH, LENGTH, MODES_TESTED, kept, model_of

GIB = 1 << 30


def policies_of(numbers: list[tuple[int, int]]) -> list[BlockPolicy]:
    return [BlockPolicy(frozenset({str(index)}), kept, cost) for index, (kept, cost) in enumerate(numbers)]


POLICY_LISTS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=6).map(policies_of)


@given(POLICY_LISTS, st.integers(1, 4), st.integers(0, 260))
def test_the_solver_is_compared_with_all_combinations(policies: list[BlockPolicy], blocks: int, budget: int) -> None:
    """A choice is found if there is one, it fits, and it costs at most one block's difference more than the best."""
    fitting = [
        sum(policy.cost for policy in choice)
        for choice in combinations_with_replacement(policies, blocks)
        if sum(policy.saved for policy in choice) <= budget
    ]
    chosen = cheapest(policies, blocks, budget)
    assert (chosen is None) == (not fitting)
    if chosen is not None:
        cost = sum(policy.cost for policy in chosen)
        assert len(chosen) == blocks and sum(policy.saved for policy in chosen) <= budget
        step = max(policy.cost for policy in policies) - min(policy.cost for policy in policies)
        assert min(fitting) <= cost <= min(fitting) + (step if blocks > 1 else 0)
        assert [policy.saved for policy in chosen] == sorted(policy.saved for policy in chosen)


def recipe(budget_gib: float | None, mode: str = "fp32", **sections: Any) -> Recipe:
    policy = "none" if budget_gib is None else "budget"
    content = {
        "model": {**BASE, "layers": 6},
        "data": {"path": "none", "sequence_length": LENGTH, "tokenizer": {"train": "char"}},
        "batch": {"global_batch": 4 * BATCH, "micro_batch": BATCH},
        "training": {"steps": 9},
        "memory": {"activation_checkpointing": policy, "budget_gib": budget_gib},
        "precision": {"mode": mode},
    }
    return parse_recipe(content | sections, world=1)


def plan(
    budget_gib: float | None, mode: str = "fp32", shard: ModelShard = FULL_MODEL, **sections: Any
) -> ActivationPlan:
    return plan_activations(recipe(budget_gib, mode, **sections), shard, 1, 0, "cpu")


def bounds(mode: str) -> tuple[int, int]:
    """Bytes saved with full recomputation and with none."""
    config = recipe(None).model
    least = activation_bytes(config, BATCH, LENGTH, mode, POLICIES["full"]).total
    return least, activation_bytes(config, BATCH, LENGTH, mode).total


@pytest.mark.parametrize("mode", MODES_TESTED)
def test_a_model_saves_the_bytes_of_its_plan_and_stays_within_the_budget(mode: str) -> None:
    least, most = bounds(mode)
    config, costs = recipe(None).model, []
    for fraction in (0.0, 0.15, 0.4, 0.7, 0.95, 1.0):
        budget = least + fraction * (most - least)
        chosen = plan(budget / GIB, mode)
        assert kept(model_of(config, mode, list(chosen.recomputed))) == chosen.saved <= budget
        assert chosen.saved > budget - (most - least) / config.layers, (
            "the unused part of the budget is less than a block"
        )
        costs.append(sum(map(len, chosen.recomputed)))
        assert len(set(chosen.recomputed)) <= 3, "few different policies"
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0, "nothing is recomputed if everything fits"


def test_cheap_steps_are_recomputed_first() -> None:
    """Pointwise steps free more bytes per second than products, and products more than attention of long sequences."""
    config = recipe(None, model=wide(2048)).model
    least, most = (activation_bytes(config, BATCH, 8192, "bf16-sr", names).total for names in (POLICIES["full"], ()))
    order: list[str] = []
    for step in range(40):
        chosen = plan((most - step / 40 * (most - least)) / GIB, "bf16-sr", data=long(8192), model=wide(2048))
        order += [name for name in chosen.recomputed[0] if name not in order]
    pointwise = {"inner", "attention_input", "feed_forward_input"}
    assert set(order[:3]) == pointwise and order[-1] == "attention_output", order


def long(length: int) -> dict[str, Any]:
    return {"path": "none", "sequence_length": length, "tokenizer": {"train": "char"}}


def wide(width: int) -> dict[str, Any]:
    return {**BASE, "layers": 6, "hidden_size": width, "intermediate_size": 3 * width}


def test_a_budget_that_is_too_small_is_rejected_with_suggestions_that_work() -> None:
    least, _ = bounds("fp32")
    with pytest.raises(RecipeError) as caught:
        plan(0.75 * least / GIB)
    (problem,) = caught.value.problems
    assert problem.path == "memory.budget_gib" and "2 x 40 tokens" in problem.reason
    assert {fix.path for fix in problem.fixes} == {"memory.budget_gib", "batch.micro_batch"}
    assert "parallel.tensor" in problem.remedy and "batch.micro_batch=1" in problem.remedy
    for fix in problem.fixes:  # each suggestion works
        batch = {"global_batch": 8, "micro_batch": fix.value if fix.path == "batch.micro_batch" else 2}
        budget = fix.value if fix.path == "memory.budget_gib" else 0.75 * least / GIB
        assert plan(budget, batch=batch).saved <= budget * GIB


def test_a_plan_is_summarised_in_one_line() -> None:
    least, most = bounds("fp32")
    assert str(plan(None)).endswith("6 blocks recompute nothing")
    assert "6 blocks recompute everything" in str(plan(least / GIB))
    line = str(plan((0.6 * least + 0.4 * most) / GIB))
    assert line.startswith("activation checkpointing budget: keeps ") and "\n" not in line
    assert sum(int(word) for word in line.split(";")[1].split() if word.isdigit()) == 6


def test_blocks_that_save_less_come_first() -> None:
    """They are recomputed when the blocks after them are freed already."""
    least, most = bounds("fp32")
    chosen = plan((least + most) / 2 / GIB)
    sizes = [
        activation_bytes(recipe(None).model, BATCH, LENGTH, "fp32", names).per_layer for names in chosen.recomputed
    ]
    assert sizes == sorted(sizes) and len(Counter(sizes)) > 1


def test_passes_in_flight_are_the_most_of_all_stages_of_a_batch_ramp() -> None:
    """Two ranks take 4 micro-batches in two rounds of 2, but the 3 of the first stage in one round."""
    most = {}
    for count, ramp in ((3, []), (4, []), (4, [{"tokens": 1, "global_batch": 3 * BATCH}])):
        content = recipe(None).model_dump(mode="json") | {
            "batch": {"global_batch": count * BATCH, "micro_batch": BATCH, "ramp": ramp},
            "parallel": {"pipeline": 2, "schedule": "interleaved-1f1b"},
        }
        chosen = plan_activations(parse_recipe(content, world=2), FULL_MODEL, 2, 0, "cpu")
        most[count, bool(ramp)] = chosen.in_flight
    assert most[3, False] == most[4, True] > most[4, False], most
