"""Loading a recipe: a plain mapping becomes a Recipe, and all its problems are found in one pass.

    mapping -> values that no field may hold refused -> preset, config.json or stored model filled in
            -> fields validated -> rules -> Recipe

Field errors do not hide rule errors: the rules run on whatever fields are valid.
"""

import typing
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hlat.config.errors import Problem, RecipeError, plain_content, size_problem
from hlat.config.explanations import FIELD_LIST, dotted_path, explain, explain_none
from hlat.config.layout_checks import Values
from hlat.config.layout_rules import compatible_defaults
from hlat.config.model_base import BASES, PRESETS, expand_model, near_presets, read_hf_config
from hlat.config.own_parts import search_beside
from hlat.config.recipe import Recipe
from hlat.config.recipe_rules import broken_rules, model_problems
from hlat.config.sections.data import DataConfig
from hlat.config.sections.model import HF_NAMES, ModelConfig
from hlat.config.sections.training import StageConfig
from hlat.config.stages import in_stage, open_defaults, span_problems, stage_contents, stage_problems
from hlat.config.yaml_files import apply_overrides, find_recipe, read_file
from hlat.runtime.quantities import QuantityError, parse_length
from hlat.runtime.storage.hub import HubModel

_NO_SECTION = ("missing", "model_type", "model_attributes_type")  # errors of a section that is not one
_EXPLAINED = 1_000  # errors in fields that are explained


def load_recipe(path: str | Path, overrides: typing.Sequence[str] = (), *, world: int | None = None) -> Recipe:
    """Read a recipe file, or a shipped recipe, as ``parse_recipe`` does; RecipeError has every problem."""
    file = find_recipe(path)
    search_beside(file)
    content, problems = apply_overrides(read_file(file), overrides)
    return _parse(content, problems, str(file), world)


def parse_recipe(
    content: dict[str, Any],
    source: str = "recipe",
    overrides: typing.Sequence[str] = (),
    *,
    world: int | None = None,
) -> Recipe:
    """Apply overrides to a mapping and validate it, for ``world`` processes or any; RecipeError has every problem."""
    # First: everything below walks over the values.
    if (too_large := size_problem(content)) is not None:
        raise RecipeError([Problem("the recipe", too_large)], source)
    content, problems = apply_overrides(content, overrides)
    return _parse(content, problems, source, world)


def numbers_with_units(
    path: str | Path, overrides: typing.Sequence[str], recipe: Recipe
) -> list[tuple[str, str, float]]:
    """Return a recipe's numbers that are written with a unit: dotted field, as written, and the number."""
    content, _ = apply_overrides(read_file(find_recipe(path)), overrides)
    return list(_numbers_with_units(content, recipe.model_dump(), ""))


def _numbers_with_units(written: Any, read: Any, prefix: str) -> Iterator[tuple[str, str, float]]:
    if isinstance(written, str) and isinstance(read, int | float):
        yield prefix, written, read
    elif isinstance(written, dict) and isinstance(read, dict):
        for name in written.keys() & read.keys():
            yield from _numbers_with_units(written[name], read[name], f"{prefix}.{name}" if prefix else name)
    elif isinstance(written, list) and isinstance(read, list | tuple):
        for index, (old, new) in enumerate(zip(written, read, strict=False)):
            yield from _numbers_with_units(old, new, f"{prefix}.{index}")


def model_section(name: str) -> ModelConfig:
    """Return the model that a preset, a config.json or its folder, or a model of the Hub describes.

    Raises:
        RecipeError: there is no such preset or file, or hlat does not support the model; lists every problem.
    """
    if name in PRESETS:
        return ModelConfig.model_validate({**PRESETS[name], "preset": name})
    if not Path(name).exists() and HubModel.parse(name) is None:
        remedy = f"The nearest presets are {near_presets(name)}; or give the path of a config.json."
        raise RecipeError([Problem("model", "there is no such preset or file.", remedy, name, True)])
    config = ModelConfig.model_validate(read_hf_config(name))
    if problems := model_problems(config):
        raise RecipeError(problems, name)
    return config


def _parse(content: dict[str, Any], problems: list[Problem], source: str, world: int | None) -> Recipe:
    if (too_large := size_problem(content)) is not None:
        raise RecipeError([*problems, Problem("the recipe", too_large)], source)
    if content.get("stages"):
        return _parse_stages(content, problems, source, world)
    content, content_problems = plain_content(content)
    content, both = _without_second_names(content)
    content_problems += both
    # Before pydantic, which would only say that a text is no number.
    content_problems += explain_none(content)
    refused = {problem.path for problem in content_problems}
    content, expansion_problems = expand_model(content, refused)
    content = _fill_between_sections(content)
    problems = [*problems, *content_problems, *expansion_problems]
    recipe: Recipe | None = None
    absent: set[str | int] = set()
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        # Without its preset a model lacks every number: reporting each would only repeat the first error.
        incomplete = "model" if expansion_problems or refused & {f"model.{name}" for name in BASES} else None
        found = [
            d
            for d in error.errors()
            if (d["type"] != "missing" or d["loc"][0] != incomplete) and dotted_path(d["loc"]) not in refused
        ]
        absent = {detail["loc"][0] for detail in found if detail["type"] in _NO_SECTION and len(detail["loc"]) == 1}
        if not content.keys() & Recipe.model_fields.keys():
            problems.append(_no_recipe(content, source))
            # A config.json of Hugging Face: its fields are no mistakes in a recipe.
            is_other_file = "model_type" in content
            found = [detail for detail in found if content and not is_other_file and detail["type"] != "missing"]
        found, lacking = _without_model_sizes(found, content.get("model"))
        problems.extend(lacking)
        problems.extend(_each_remedy_once(explain(detail) for detail in found[:_EXPLAINED]))
    # Field errors must not hide rule errors: the rules run on whatever is valid.
    values = Values(_valid_values(Recipe, content))
    values = values if world is None else values.having("world", world)
    # A default that cannot stand beside what is given gives way to it.
    others = compatible_defaults(values, partial(_is_written, content))
    for path, value in others.items():
        values = values.having(path, value)
    broken = broken_rules(values)
    # A missing section and a refused value are reported once, not again for each of their fields.
    problems.extend(
        _marked_if_default(problem, content)
        for problem in broken
        if problem.path.split(".")[0] not in absent and problem.path not in refused
    )
    if problems:
        raise RecipeError(sorted(problems, key=_section_order), source, _valid_sections(content))
    assert recipe is not None, "a recipe without problems has been validated"
    return recipe.having(others, given=False)


_ANY_STEPS = 1_000_000_000  # of a stage while its own length is not known


def _parse_stages(content: dict[str, Any], problems: list[Problem], source: str, world: int | None) -> Recipe:
    """Validate each stage as a recipe of its own, and join them."""
    content, refused = plain_content(content)
    problems = [*problems, *refused]
    try:
        stages = TypeAdapter(tuple[StageConfig, ...]).validate_python(content["stages"])
    except ValidationError as error:
        found = [{**detail, "loc": ("stages", *detail["loc"])} for detail in error.errors()[:_EXPLAINED]]
        problems += _each_remedy_once(explain(typing.cast(ErrorDetails, detail)) for detail in found)
        raise RecipeError(problems, source) from None
    problems += stage_problems(content, stages)
    training = content.get("training") if isinstance(content.get("training"), dict) else {}
    content = _declared_for_longest({**content, "training": {**(training or {}), "steps": _ANY_STEPS, "tokens": None}})
    parsed: list[Recipe] = []
    for number, sections in enumerate(stage_contents(content, stages)):
        try:
            parsed.append(_parse(sections, [], source, world))
        except RecipeError as error:
            found_here = [in_stage(problem, number, stages) for problem in error.problems]
            problems += [problem for problem in found_here if problem not in problems]
    if problems:
        raise RecipeError(sorted(problems, key=_section_order), source)
    # As they were read, with the defaults that gave way.
    changes = [
        stage.model_copy(update={name: _read(recipe, name, getattr(stage, name)) for name in _changed(stage)})
        for stage, recipe in zip(stages, parsed, strict=True)
    ]
    recipe = parsed[0].model_copy(update={"stages": tuple(changes)}).having({"training.steps": None}, given=False)
    recipe = recipe.with_stage_defaults([open_defaults(stage) for stage in parsed])
    if problems := list(span_problems(recipe.each_stage())):
        raise RecipeError(problems, source)
    return recipe


def _changed(stage: StageConfig) -> list[str]:
    return [name for name in StageConfig.model_fields if name in Recipe.model_fields and getattr(stage, name)]


def _read(recipe: Recipe, section: str, written: dict[str, Any]) -> dict[str, Any]:
    values = getattr(recipe, section).model_dump()
    return {name: values[name] for name in written}


def _declared_for_longest(content: dict[str, Any]) -> dict[str, Any]:
    """Declare the model for the longest sequences of all stages, if the recipe does not say for how long."""
    model = content.get("model")
    if not isinstance(model, dict) or model.get("max_sequence_length") is not None:
        return content
    lengths = [DataConfig.model_fields["sequence_length"].default]
    data = content.get("data")
    for values in (data, *(each.get("data") for each in content["stages"])):
        length = values.get("sequence_length") if isinstance(values, dict) else None
        with suppress(QuantityError):  # a refused length is reported by its stage
            length = parse_length(length) if isinstance(length, str) else length
            lengths += [length] if isinstance(length, int) else []
    given = lengths[1:] if isinstance(data, dict) and "sequence_length" in data else lengths
    return {**content, "model": {**model, "max_sequence_length": max(given)}}


def _without_second_names(content: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Leave out names of Hugging Face in the model section whose field has another value, a problem each."""
    model = content.get("model")
    both = [name for name in HF_NAMES if isinstance(model, dict) and name in model]
    if not both or not isinstance(model, dict):
        return content, []
    problems = [
        Problem(
            f"model.{name}", f"is model.{HF_NAMES[name]} here, which has another value.", "Keep one.", model[name], True
        )
        for name in both
    ]
    return {**content, "model": {name: value for name, value in model.items() if name not in both}}, problems


def _without_model_sizes(found: list[ErrorDetails], model: Any) -> tuple[list[ErrorDetails], list[Problem]]:
    """Report a model without sizes in one problem that names presets, instead of a line for each size."""
    # Not those deeper in it, such as the factor of a RoPE scaling
    missing = (detail for detail in found if detail["type"] == "missing" and detail["loc"][0] == "model")
    absent = [detail for detail in missing if len(detail["loc"]) <= 2]
    names = [str(detail["loc"][1]) for detail in absent if len(detail["loc"]) == 2]
    if len(names) == 1 or not absent:  # one that was forgotten: its own description says more
        return found, []
    reason = f"lacks {', '.join(names[:-1])} and {names[-1]}." if names else "is required."
    remedy = f"Take the sizes of a preset, as in model.preset={near_presets(model)}{', or give them' if names else ''}."
    return [detail for detail in found if detail not in absent], [Problem("model", reason, remedy)]


def _no_recipe(content: dict[str, Any], source: str) -> Problem:
    remedy = "A recipe has model, data and training, and their fields indented below; hlat init writes one."
    if not content:
        return Problem(source, "is empty.", remedy)
    if "model_type" in content:
        remedy = "It looks like the config.json of a model: write model: {hf_config: FILE} in a recipe, and name that."
    return Problem(source, "holds no section of a recipe.", remedy)


def _each_remedy_once(problems: Iterable[Problem]) -> Iterator[Problem]:
    # Two unknown fields of a section would each list all fields that there are.
    seen: set[str] = set()
    for problem in problems:
        again = problem.remedy in seen and problem.remedy.startswith(FIELD_LIST)
        seen.add(problem.remedy)
        yield replace(problem, remedy="") if again else problem


def _marked_if_default(problem: Problem, content: Any) -> Problem:
    # A field that the recipe does not give is marked: its reader would look for the value in vain.
    return (
        problem if problem.path == "world" or _is_written(content, problem.path) else replace(problem, is_default=True)
    )


def _is_written(content: Any, path: str) -> bool:
    """Return True if a recipe's content gives a field, or its path leads through a list."""
    for name in path.split("."):
        if isinstance(content, list | tuple):
            return True
        if not isinstance(content, dict) or name not in content:
            return False
        content = content[name]
    return True


def _valid_sections(content: dict[str, Any]) -> dict[str, BaseModel]:
    found = {}
    for name, field in Recipe.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            with suppress(ValidationError):
                found[name] = kind.model_validate(content.get(name, {}))
    return found


def _section_order(problem: Problem) -> int:
    sections = ["", *Recipe.model_fields]
    head = problem.path.split(".")[0]
    return sections.index(head) if head in sections else 0


def _fill_between_sections(content: dict[str, Any]) -> dict[str, Any]:
    # Defaults that one section takes from another are filled in, so that a resolved recipe shows them.
    model, data = content.get("model"), content.get("data")
    if not isinstance(model, dict) or not isinstance(data, dict):
        return content
    tokenizer = data.get("tokenizer", {})
    if isinstance(tokenizer, dict) and "vocab_size" in model:
        data = {**data, "tokenizer": {"vocab_size": model["vocab_size"], **tokenizer}}
    if model.get("max_sequence_length") is None:
        length = data.get("sequence_length", DataConfig.model_fields["sequence_length"].default)
        with suppress(QuantityError):  # a refused length is reported once
            length = parse_length(length) if isinstance(length, str) else length
            model = {**model, "max_sequence_length": length}
    return {**content, "model": model, "data": data}


def _valid_values(section: type[BaseModel], content: Any, prefix: str = "") -> dict[str, Any]:
    # Each field by itself: one wrong field of a section must not hide the others from the rules.
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
            if isinstance(content[name], dict):  # the defaults of a section that is a text say nothing
                values.update(_valid_values(child, content[name], f"{path}."))
            continue
        try:
            annotated: Any = typing.Annotated[(child, *field.metadata)] if field.metadata else child
            values[path] = TypeAdapter(annotated).validate_python(content[name])
        except ValidationError:
            continue
    return values
