"""Compatibility of a recipe with the one in a checkpoint that a run goes on from.

    recipe in the checkpoint, recipe now --field by field--> refused (all at once), or recorded

A field marked ``fixed`` in its section defines the model, the order of the data or the trajectory; a change there would
make it another run. Which corpus a run reads is decided by the content of the prepared data, not by its path. Both
recipes name the precision mode that was resolved, never ``auto``.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hlat.checkpoint.protocol import Checkpoint
from hlat.config import Recipe
from hlat.config.sections import PrecisionConfig
from hlat.runtime import CheckpointError

_MODE = "precision.mode"
_OTHER_MODE = (
    "A mode computes other numbers from the same state, and what one keeps besides (wider weights or moments, "
    "compensation) another would drop. With checkpoint.init_from a new run takes the weights into any mode."
)


@dataclass(frozen=True)
class RecipeChange:
    """A value that differs between the checkpoint and the recipe; JSON values, None where there is none."""

    path: str
    old: Any
    new: Any


def software_versions() -> dict[str, str]:
    """What the state was computed with, to be saved beside it."""
    return {"hlat": version("hlat"), "torch": version("torch"), "python": platform.python_version()}


def read_saved_run(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], str]:
    """The recipe that a run's checkpoint was saved with, JSON values, and the fingerprint of the data it read.

    Raises:
        CheckpointError: it is no checkpoint of a run.
    """
    meta = checkpoint.meta
    if absent := [name for name in ("recipe", "data_fingerprint") if not meta.get(name)]:
        raise CheckpointError(
            f"{checkpoint.path}: is no checkpoint of a run: its meta.json has no {' and no '.join(absent)}. To begin "
            "a run with its weights, move it out of the run folder and set checkpoint.init_from to it."
        )
    return meta["recipe"], meta["data_fingerprint"]


def check_resume(
    saved_recipe: Mapping[str, Any], saved_data_fingerprint: str, recipe: Recipe, data_fingerprint: str
) -> list[RecipeChange]:
    """Hold the recipe of a checkpoint against the one a run is to go on with.

    Args:
        saved_recipe: ``recipe`` in the checkpoint's meta, JSON values.
        saved_data_fingerprint: fingerprint of the prepared data the checkpoint was trained on.
        recipe: the recipe now.
        data_fingerprint: fingerprint of the prepared data now.

    Returns:
        Changes that are allowed, to be recorded.

    Raises:
        CheckpointError: lists every change that is not.
    """
    refused, allowed = _compare(saved_recipe, recipe)
    if saved_data_fingerprint != data_fingerprint:
        refused.append(RecipeChange("data (content of the prepared tokens)", saved_data_fingerprint, data_fingerprint))
    if refused:
        raise CheckpointError(_refusal(refused))
    return allowed


def _refusal(refused: list[RecipeChange]) -> str:
    head = "the run cannot go on with this recipe: it would be another model, other data or another trajectory"
    lines = [f"{change.path}: saved with {change.old!r}, now {change.new!r}" for change in refused]
    remedy = "Set the saved values again, or use another run.dir (run.name) for a new run."
    if any(change.path == _MODE for change in refused):
        remedy += f"\n{_OTHER_MODE}"
    return "\n  ".join([head, *lines]) + "\n" + remedy


def saved_precision_mode(saved_recipe: Mapping[str, Any]) -> str:
    """The precision mode of the run that a checkpoint belongs to, from ``recipe`` in its meta."""
    section = _saved_value(saved_recipe, "precision", Recipe.model_fields["precision"])
    return str(_saved_value(section if isinstance(section, dict) else {}, "mode", PrecisionConfig.model_fields["mode"]))


def _compare(saved: Mapping[str, Any], recipe: Recipe) -> tuple[list[RecipeChange], list[RecipeChange]]:
    refused: list[RecipeChange] = []
    allowed: list[RecipeChange] = []
    _walk("", dict(saved), recipe, False, refused, allowed)
    return refused, allowed


def _walk(
    path: str,
    saved: Mapping[str, Any],
    section: BaseModel,
    fixed: bool,
    refused: list[RecipeChange],
    allowed: list[RecipeChange],
) -> None:
    current = section.model_dump(mode="json")
    fields = type(section).model_fields
    for name in [*fields, *(key for key in saved if key not in fields)]:
        here = f"{path}.{name}" if path else name
        field = fields.get(name)
        is_fixed = fixed or (field is not None and _is_fixed(field))
        old = _saved_value(saved, name, field)
        new = current.get(name)
        value = getattr(section, name, None)
        if isinstance(value, BaseModel) and isinstance(old, dict):
            _walk(here, old, value, is_fixed, refused, allowed)
        elif isinstance(value, tuple) and isinstance(old, list) and _pairs(value, old):
            for index, (saved_one, one) in enumerate(_pairs(value, old)):
                _walk(f"{here}.{index}", saved_one, one, is_fixed, refused, allowed)
        elif _meaning(name, old, saved) != _meaning(name, new, current):
            (refused if is_fixed or _has_fixed(value, old, field) else allowed).append(RecipeChange(here, old, new))


def _pairs(sections: tuple[Any, ...], saved: list[Any]) -> list[tuple[Any, BaseModel]]:
    """Sections and what was saved of them, where there are as many; nothing for values of another kind."""
    both = list(zip(saved, sections, strict=False))
    alike = len(saved) == len(sections) and all(isinstance(one, BaseModel) for one in sections)
    return both if alike and all(isinstance(one, dict) for one in saved) else []


def _has_fixed(value: Any, old: Any, field: FieldInfo | None) -> bool:
    """Whether sections that were added to a list, or taken from it, say anything in a fixed field."""
    if field is None or not isinstance(value, tuple):
        return False
    kinds = [kind for kind in get_args(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    names = {name: inner for kind in kinds for name, inner in kind.model_fields.items() if _is_fixed(inner)}
    if not names:
        return False
    both = [one.model_dump(mode="json") for one in value] + (old if isinstance(old, list) else [])
    return any(
        not isinstance(one, dict) or one.get(name, inner.get_default()) != inner.get_default()
        for one in both
        for name, inner in names.items()
    )


def _is_fixed(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and extra.get("resume") == "fixed"


def _saved_value(saved: Mapping[str, Any], name: str, field: FieldInfo | None) -> Any:
    """A field that the checkpoint does not know yet had its default's effect when it was saved, or the former one."""
    if name in saved or field is None or field.is_required():
        return saved.get(name)
    if isinstance(field.json_schema_extra, dict) and "formerly" in field.json_schema_extra:
        return field.json_schema_extra["formerly"]
    default = field.get_default(call_default_factory=True)
    if not isinstance(default, BaseModel):
        return default
    return {inner: _saved_value({}, inner, field) for inner, field in type(default).model_fields.items()}


def _meaning(name: str, value: Any, values: Mapping[str, Any]) -> Any:
    """A value with the documented meaning of null filled in: writing out a default changes nothing."""
    heads, width = values.get("heads"), values.get("hidden_size")
    if value is None and name == "kv_heads":
        return heads
    if value is None and name == "head_dim" and isinstance(heads, int) and isinstance(width, int) and heads:
        return width // heads
    return value
