"""A recipe with three stages: short sequences, other text with a decay, four times the sequence with another layout."""

from typing import Any

from hlat.config import Recipe
from hlat.config.load import parse_recipe
from tests.support.rehearsal.small_recipes import SMALL

LONG = {"data": {"sequence_length": 128}, "batch": {"global_batch": 4}, "parallel": {"context": 2}}
STAGES: list[dict[str, Any]] = [
    {"name": "short", "steps": 6},
    {"name": "anneal", "tokens": 1000, "data": {"path": "other"}, "schedule": {"kind": "linear", "warmup_steps": 0}},
    {"name": "long", "steps": 3, "model": {"rope": {"theta": 1e6}}, **LONG},
]


def staged_content(**sections: Any) -> dict[str, Any]:
    """Sections of the recipe, with some fields of some sections replaced."""
    base: dict[str, Any] = {name: dict(values) for name, values in SMALL.items()}
    base["model"].pop("max_sequence_length")
    base["batch"] = {"global_batch": 8}
    base["training"] = {"seed": 3}
    base["stages"] = [dict(stage) for stage in STAGES]
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    return base


def staged(world: int = 2, **sections: Any) -> Recipe:
    return parse_recipe(staged_content(**sections), world=world)


def plain_of(number: int, world: int = 2) -> Recipe:
    """A recipe without stages, written by hand as a stage is: what is said of the stage has to be true of it."""
    content = staged_content()
    del content["stages"]
    content["model"]["max_sequence_length"] = 128
    content["training"] |= {"steps": (6, 4, 3)[number]}
    if number:
        content["data"] |= {"path": "other"}
        content["schedule"] = {"kind": "linear", "warmup_steps": 0}
    if number == 2:
        content["model"]["rope"] = {"theta": 1e6}
        content["batch"] |= LONG["batch"]
        content["data"] |= LONG["data"]
        content["parallel"] = LONG["parallel"]
    return parse_recipe(content, world=world)
