"""Small recipes, which are rehearsed in about a second."""

from typing import Any

from hlat.config import Recipe
from hlat.config.load import parse_recipe

SMALL: dict[str, Any] = {
    "model": {
        "vocab_size": 320,
        "layers": 4,
        "hidden_size": 32,
        "intermediate_size": 96,
        "heads": 4,
        "kv_heads": 2,
        "max_sequence_length": 32,
    },
    "data": {"path": "none", "sequence_length": 32, "tokenizer": {"train": "char"}},
    "batch": {"global_batch": 8, "micro_batch": 1},
    "training": {"steps": 10, "seed": 3},
    "precision": {"mode": "fp32"},
}


def recipe_of(world: int = 1, **sections: dict[str, Any]) -> Recipe:
    """The small recipe with some fields of some sections replaced; one or two ranks have few micro-batches."""
    content = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in {*SMALL, *sections}}
    if world <= 2 and "batch" not in sections:
        content["batch"]["micro_batch"] = 4 // world  # what is rehearsed costs time for each operation, however small
    return parse_recipe(content, world=world)
