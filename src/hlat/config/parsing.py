"""From a plain mapping to a Recipe, with every problem found in one pass.

    mapping -> preset or config.json filled in -> fields validated -> rules between fields -> Recipe

Field errors do not hide rule errors: the rules run on whatever fields are valid.
"""

import difflib
import json
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hlat.config.data import DataConfig
from hlat.config.errors import Problem, RecipeError
from hlat.config.hf import hf_to_model
from hlat.config.presets import PRESETS
from hlat.config.recipe import Recipe
from hlat.config.rules import broken_rules
from hlat.config.section import Section
from hlat.config.values import Values
from hlat.config.yamlfile import apply_overrides, find_recipe, merge, read_file


def load_recipe(path: str | Path, overrides: typing.Sequence[str] = (), *, world: int | None = None) -> Recipe:
    """Read a recipe file (or a shipped recipe by name), apply overrides, validate.

    Args:
        path: the file, or the name.
        overrides: ``a.b=c`` each.
        world: number of processes that the layout has to suit; None asks only whether it suits any.

    Raises:
        RecipeError: with every problem of file, overrides, fields and rules.
    """
    file = find_recipe(path)
    content, problems = apply_overrides(read_file(file), overrides)
    return _parse(content, problems, str(file), world)


def parse_recipe(content: dict[str, Any], source: str = "recipe", *, world: int | None = None) -> Recipe:
    """Validate a mapping, as from ``Recipe.model_dump()`` or JSON.

    Args:
        content: the sections.
        source: what errors call it.
        world: number of processes that the layout has to suit; None asks only whether it suits any.

    Raises:
        RecipeError: with every problem of fields and rules.
    """
    return _parse(content, [], source, world)


def _parse(content: dict[str, Any], problems: list[Problem], source: str, world: int | None) -> Recipe:
    content, expansion_problems = _expand_model(content)
    content = _fill_between_sections(content)
    problems = [*problems, *expansion_problems]
    recipe: Recipe | None = None
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        # Without its preset a model lacks every number: saying so would only repeat the first mistake.
        incomplete = "model" if expansion_problems else None
        found = [d for d in error.errors() if d["type"] != "missing" or d["loc"][0] != incomplete]
        problems.extend(_explain(detail) for detail in found)
    values = Values(_valid_values(Recipe, content))
    problems.extend(broken_rules(values if world is None else values.having("world", world)))
    if problems:
        raise RecipeError(sorted(problems, key=_section_order), source)
    assert recipe is not None, "a recipe without problems has been validated"
    return recipe


def _section_order(problem: Problem) -> int:
    sections = ["", *Recipe.model_fields]
    head = problem.path.split(".")[0]
    return sections.index(head) if head in sections else 0


def _expand_model(content: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The model section with the numbers of its preset or config.json underneath its own."""
    model = content.get("model")
    if not isinstance(model, dict):
        return content, []
    preset, hf_config = model.get("preset"), model.get("hf_config")
    if preset is not None and hf_config is not None:
        return content, [
            Problem(
                "model.preset",
                "the recipe gives both preset and hf_config.",
                "Keep one of them.",
                preset,
                True,
            )
        ]
    if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
        remedy = f"{_suggestion(str(preset), PRESETS)}Known: {', '.join(PRESETS)}."
        return content, [Problem("model.preset", "there is no such preset.", remedy, preset, True)]
    try:
        base = PRESETS[preset] if preset is not None else _read_hf_config(hf_config) if hf_config is not None else {}
    except RecipeError as error:
        return content, list(error.problems)
    return {**content, "model": merge(base, model)}, []


def _fill_between_sections(content: dict[str, Any]) -> dict[str, Any]:
    """Defaults that one section takes from another, so that a resolved recipe says them."""
    model, data = content.get("model"), content.get("data")
    if not isinstance(model, dict) or not isinstance(data, dict):
        return content
    tokenizer = data.get("tokenizer", {})
    if isinstance(tokenizer, dict) and "vocab_size" in model:
        data = {**data, "tokenizer": {"vocab_size": model["vocab_size"], **tokenizer}}
    if model.get("max_sequence_length") is None:
        length = data.get("sequence_length", DataConfig.model_fields["sequence_length"].default)
        model = {**model, "max_sequence_length": length}
    return {**content, "model": model, "data": data}


def _read_hf_config(name: Any) -> dict[str, Any]:
    path = Path(str(name))
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
        return hf_to_model(config)
    except (OSError, ValueError) as error:
        remedy = "Name a Hugging Face config.json or the folder that holds it."
        raise RecipeError([Problem("model.hf_config", f"cannot be read: {error}.", remedy, name, True)]) from error


def _explain(detail: ErrorDetails) -> Problem:
    path = _written_place(detail["loc"])
    if detail["type"] == "extra_forbidden":
        section, name = _section_at(detail["loc"][:-1]), str(detail["loc"][-1])
        known = list(section.model_fields) if section is not None else []
        remedy = _suggestion(name, known) or f"Fields here: {', '.join(known)}."
        return Problem(path, "there is no such field.", remedy.strip())
    if detail["type"] == "missing":
        return Problem(path, "is required.", _description(detail["loc"]))
    value = detail["input"]
    return Problem(
        path,
        f"{_lower_first(detail['msg'])}.",
        _description(detail["loc"]),
        value,
        not isinstance(value, dict),
    )


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _suggestion(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}? " if close else ""


def _section_classes(annotation: Any) -> list[type[Section]]:
    """The section classes in an annotation such as ``RopeConfig``, ``tuple[SourceConfig, ...]`` or a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for inner in typing.get_args(annotation) for section in _section_classes(inner)]


def _section_at(location: tuple[int | str, ...]) -> type[Section] | None:
    """The section at a place in a recipe; of a union, the one that its tag (a part of pydantic's place) names."""
    candidates: list[type[Section]] = [Recipe]
    for part in location:
        if len(candidates) > 1:
            candidates = [c for c in candidates if part in typing.get_args(c.model_fields["kind"].annotation)]
        elif candidates and isinstance(part, str):
            field = candidates[0].model_fields.get(part)
            candidates = _section_classes(field.annotation) if field is not None else []
    return candidates[0] if len(candidates) == 1 else None


def _written_place(location: tuple[int | str, ...]) -> str:
    """The dotted path as it is written in a recipe, without the tags of unions that pydantic puts in."""
    parts = [part for index, part in enumerate(location) if not (index and _is_tag(location[:index], part))]
    return ".".join(map(str, parts))


def _is_tag(before: tuple[int | str, ...], part: int | str) -> bool:
    section = _section_at(before[:-1])
    field = section.model_fields.get(str(before[-1])) if section is not None else None
    union = _section_classes(field.annotation) if field is not None else []
    return len(union) > 1 and any(part in typing.get_args(c.model_fields["kind"].annotation) for c in union)


def _description(location: tuple[int | str, ...]) -> str:
    section = _section_at(location[:-1])
    field = section.model_fields.get(str(location[-1])) if section is not None else None
    return f"It means: {field.description}" if field is not None and field.description else ""


def _valid_values(section: type[BaseModel], content: Any, prefix: str = "") -> dict[str, Any]:
    """Values by dotted path of all fields that are valid on their own, defaults included."""
    values: dict[str, Any] = {}
    content = content if isinstance(content, dict) else {}
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        child: Any = field.annotation
        is_section = isinstance(child, type) and issubclass(child, BaseModel)
        if name not in content:
            if not field.is_required():
                values[path] = field.get_default(call_default_factory=True)
            if is_section:
                values.update(_valid_values(child, {}, f"{path}."))
            continue
        if is_section:
            values.update(_valid_values(child, content[name], f"{path}."))
            continue
        try:
            annotated: Any = typing.Annotated[(child, *field.metadata)] if field.metadata else child
            values[path] = TypeAdapter(annotated).validate_python(content[name])
        except ValidationError:
            continue
    return values
