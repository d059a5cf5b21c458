"""Fields of the recipe section ``memory``."""

import pytest

from hlat.config import RecipeError
from hlat.config.load import parse_recipe
from tests.support.activation_checkpointing.small import BASE


def content(**memory: object) -> dict[str, object]:
    return {
        "model": BASE,
        "data": {"path": "none", "sequence_length": 32, "tokenizer": {"train": "char"}},
        "training": {"steps": 9},
        "precision": {"mode": "fp32"},
        "memory": memory,
    }


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_every_policy_is_accepted(policy: str) -> None:
    assert parse_recipe(content(activation_checkpointing=policy)).memory.activation_checkpointing == policy


def test_a_budget_is_accepted() -> None:
    memory = parse_recipe(content(activation_checkpointing="budget", budget_gib=1.5)).memory
    assert (memory.activation_checkpointing, memory.budget_gib) == ("budget", 1.5)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"activation_checkpointing": "budget"}, "needs the GiB"),
        ({"activation_checkpointing": "none", "budget_gib": 2}, "activation_checkpointing=none keeps what it keeps"),
        ({"activation_checkpointing": "full", "budget_gib": 2}, "=budget"),
        ({"activation_checkpointing": "budget", "budget_gib": 0}, "greater than 0"),
        ({"activation_checkpointing": "some"}, "'selective'"),
    ],
)
def test_invalid_combinations_are_rejected(memory: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        parse_recipe(content(**memory))
    assert caught.value.problems[0].path.startswith("memory.")
