"""``precision.rounding=hardware`` is refused wherever two ranks would round the same element apart."""

from typing import Any

import pytest

from hlat.config import Recipe, RecipeError
from hlat.config.load import parse_recipe

MODEL = {"vocab_size": 64, "layers": 4, "hidden_size": 32, "intermediate_size": 96, "heads": 4, "kv_heads": 2}


def recipe(world: int = 1, **sections: Any) -> Recipe:
    content = {
        "run": {"deterministic": False},
        "model": MODEL,
        "data": {"path": "none", "sequence_length": 16, "tokenizer": {"train": "char"}},
        "batch": {"global_batch": 8, "micro_batch": 1},
        "training": {"steps": 9},
        "precision": {"mode": "bf16-sr", "rounding": "hardware"},
    }
    return parse_recipe(content | sections, world=world)


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (1, {"zero": 0}),
        (4, {"zero": 1}),
        (4, {"zero": 3, "context": 2}),
        (4, {"pipeline": 2, "zero": 1}),
    ],
)
def test_layouts_that_store_every_element_once_are_accepted(world: int, parallel: dict[str, int]) -> None:
    accepted = recipe(world, parallel=parallel)
    assert accepted.precision.in_hardware
    assert accepted.in_mode("bf16-sr").precision == accepted.precision, "resolving the mode keeps the rounding"


@pytest.mark.parametrize(
    ("world", "sections", "says"),
    [
        (2, {"parallel": {"tensor": 2}}, r"parallel\.tensor.*norm weights.*Use parallel\.tensor=1"),
        (2, {"parallel": {"zero": 0}}, r"parallel\.zero.*stores all weights.*Use parallel\.zero=1"),
        (2, {"parallel": {"zero": 0, "context": 2}}, r"parallel\.zero.*stores all weights"),
        (4, {"parallel": {"replicas": 2}}, r"parallel\.replicas.*every replica.*Use parallel\.replicas=1"),
        (
            2,
            {"parallel": {"pipeline": 2}, "model": MODEL | {"tie_embeddings": True}},
            r"parallel\.pipeline.*tied embedding.*tie_embeddings=false",
        ),
        (
            1,
            {"precision": {"mode": "mixed", "rounding": "hardware"}},
            r"precision\.rounding.*Use precision\.mode=bf16-sr",
        ),
        (1, {"precision": {"rounding": "hardware"}}, r"precision\.mode=auto rounds nothing"),
        (1, {"run": {"deterministic": True}}, r"precision\.rounding.*no checkpoint.*run\.deterministic=false"),
    ],
)
def test_what_would_drift_apart_is_refused_with_a_remedy(world: int, sections: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        recipe(world, **sections)
    software = sections | {"precision": {"mode": sections.get("precision", {}).get("mode", "bf16-sr")}}
    recipe(world, **software)


def test_all_reasons_are_given_at_once() -> None:
    with pytest.raises(RecipeError) as error:
        recipe(4, parallel={"tensor": 2, "zero": 0}, run={"deterministic": True})
    assert len(error.value.problems) == 3
