"""Arguments of the functions of the Python API: the check of every call, and recipes.

    call --bind to the signature--> the function, or every wrong argument at once, as a LaunchError
    recipe file, name, mapping or Recipe, overrides --> Recipe, TrainingJob

For a field of the recipe in place of an argument (``hlat.train(steps=3)``) the message has the call that sets it.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hlat.config import (
    OptimizerConfig,
    OwnPart,
    Problem,
    Recipe,
    RecipeError,
    field_called,
    own_parts,
    parse_recipe,
    short,
)
from hlat.config import load_recipe as read_recipe
from hlat.runtime.errors import LaunchError

if TYPE_CHECKING:
    from hlat.launch import TrainingJob


P = ParamSpec("P")
R = TypeVar("R")

_OF_THE_RECIPE = "overrides"  # argument of the functions that change a recipe while they load it


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function of the API refuse arguments that it does not take, or lacks, with a ``LaunchError``."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            # Only to find wrong arguments: a TypeError of the function itself is a defect, and is not caught.
            signature.bind(*args, **kwargs)
        except TypeError:
            message = describe_wrong_call(function.__name__, signature, args, kwargs)
        else:
            return function(*args, **kwargs)
        # Outside of except: the TypeError of bind would only repeat it.
        raise LaunchError(message)

    return checked


def describe_wrong_call(
    name: str, signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> str:
    """Say what is wrong with the arguments of a call, and what the function takes."""
    problems = list(_call_problems(signature, args, kwargs))
    fields = _meant_fields(signature, kwargs)
    if fields:
        settings = ", ".join(f'"{field}": {short(value)}' for field, value in fields.items())
        verb = "is a field" if len(fields) == 1 else "are fields"
        example = _example(name, signature, f"{{{settings}}}")
        problems.append(f"{' and '.join(fields)} {verb} of the recipe: {example}.")
    return f"hlat.{name}: {' '.join(problems)} It takes {', '.join(signature.parameters)}."


def _call_problems(
    signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[str]:
    parameters = signature.parameters
    by_position = [each.name for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    unknown = [each for each in kwargs if each not in parameters]
    if unknown:
        yield " ".join([f"there is no argument {' or '.join(unknown)}.", *_meant(unknown, parameters)])
    if len(args) > len(by_position):
        by_name = [each.name for each in parameters.values() if each.kind is each.KEYWORD_ONLY]
        example = f" Name the others, as in {by_name[0]}=..." if by_name else ""
        yield f"{len(args)} arguments are given without a name, and only {' and '.join(by_position)} may be.{example}"
    if twice := [each for each in by_position[: len(args)] if each in kwargs]:
        yield f"{' and '.join(twice)} is given twice, by position and by name."
    given = {*by_position[: len(args)], *kwargs}
    required = [each.name for each in parameters.values() if each.default is each.empty]
    if missing := [each for each in required if each not in given]:
        yield f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing."


def _meant(unknown: list[str], parameters: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    """Yield a sentence for each unknown argument that resembles another, or is called so by another program."""
    for name in unknown:
        meant = field_called(name) or ""
        option, note = meant.removeprefix("--").partition(" ")[0], meant.partition(": ")[2]
        close = get_close_matches(name, parameters, n=1, cutoff=0.7)
        if meant.startswith("--") and option in parameters:
            yield f"For {name} there is {option}{': ' if note else ''}{note}."
        elif own := _named_like_a_field(meant, parameters):
            yield f"Here {name} is {own}."
        elif close:
            yield f"Did you mean {close[0]}?"
        elif meant and not meant.startswith("--") and not _is_field(meant):
            yield f"In recipes, {name} is {meant}."


def _named_like_a_field(meant: str, parameters: Mapping[str, inspect.Parameter]) -> str | None:
    # Functions that load a recipe take its fields as overrides, not as arguments.
    if _OF_THE_RECIPE in parameters:
        return None
    return next((name for name in re.findall(r"\w\.(\w+)", meant) if name in parameters), None)


def _is_field(meant: str) -> bool:
    # An option, or a field that means something else, has a note behind it.
    return meant.replace(".", "_").isidentifier()


def _meant_fields(signature: inspect.Signature, kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a recipe that unknown arguments stand for, with the values given."""
    if _OF_THE_RECIPE not in signature.parameters:
        return {}
    meant = {name: field_called(name) for name in kwargs if name not in signature.parameters}
    return {field: kwargs[name] for name, field in meant.items() if field and _is_field(field)}


def _example(name: str, signature: inspect.Signature, overrides: str) -> str:
    required = [each for each in signature.parameters.values() if each.default is each.empty]
    places = [each.name.upper() for each in required if each.kind is each.POSITIONAL_OR_KEYWORD] or ["RECIPE"]
    names = [f"{each.name}=..." for each in required if each.kind is each.KEYWORD_ONLY]
    return f"hlat.{name}({', '.join([*places, overrides, *names])})"


Overrides = Sequence[str] | Mapping[str, object]
"""Changes of a recipe: ``["training.steps=100"]``, or ``{"training.steps": 100}``."""


@checks_arguments
def load_recipe(
    path: str | Path | Mapping[str, object], overrides: Overrides = (), *, world: int | None = None
) -> Recipe:
    """Load a recipe and check it.

    Args:
        path: recipe file, the name of a shipped recipe, or the sections themselves: ``{"run": {"name": "mine"}, ...}``.
        overrides: changes, as ``["training.steps=100"]`` or ``{"training.steps": 100}``.
        world: number of processes that the layout must fit; None checks only that some number fits.

    Returns:
        The recipe, with all defaults filled in. It cannot be changed; load it again with other overrides.

    Raises:
        RecipeError: with every problem of file, overrides and fields (``problems``).
    """
    _check_kind(path)
    if isinstance(path, Mapping):
        return parse_recipe(_plain_values(path), "the recipe", override_words(overrides), world=world)
    return read_recipe(path, override_words(overrides), world=world)


def _check_kind(recipe: object) -> None:
    if not isinstance(recipe, str | Path | Mapping | Recipe):
        reason = f"a {type(recipe).__name__} is no recipe."
        remedy = "Give the path of a recipe file, the name of a shipped recipe, or its sections as a mapping."
        raise RecipeError([Problem("the recipe", reason, remedy, recipe, True)], "the recipe")


def _plain_values(sections: Mapping[str, object]) -> dict[str, Any]:
    try:
        # What YAML would have given: lists for tuples, and texts for paths.
        plain: dict[str, Any] = json.loads(json.dumps(dict(sections), default=str))
    except (TypeError, ValueError, RecursionError) as error:  # keys that are no texts, cycles
        raise RecipeError([Problem("the recipe", f"has values that no recipe file can hold: {error}.")]) from error
    return plain


@checks_arguments
def draft_recipe(
    texts: str | Path | Sequence[str | Path],
    *,
    name: str = "mine",
    hours: float = 1.0,
    column: str | None = None,
    start: str | Path | None = None,
    model: str | Path | None = None,
    device: str = "auto",
) -> str:
    """Draft a recipe for a corpus and this machine.

    Args:
        texts: the corpus: a file, folder or glob, or several; each format of a mixed folder becomes a source.
        name: name of the run.
        hours: time to train.
        column: column or key of the text; None tries the usual names.
        start: model to continue from, as ``model.from`` takes it; None trains a new one.
        model: preset or config.json of a new model; None chooses the size.
        device: device type, as ``run.device`` takes it.

    Returns:
        The text of a recipe file, with the reason of each number as a comment.

    Raises:
        RecipeError: there is no such model, or hlat does not support it.
        DataError: the corpus or the tokenizer cannot be used.
        LaunchError: there is no such device.
    """
    from hlat.draft import draft_recipe as draft

    start, model = optional_text(start), optional_text(model)
    paths = [str(path) for path in ([texts] if isinstance(texts, str | Path) else texts)]
    return draft(paths, name=name, hours=hours, column=column, start=start, model=model, device=device)


@contextmanager
def recipe_job(
    recipe: Recipe | str | Path,
    overrides: Overrides,
    profile: bool = False,
    allow_faults: bool = False,
    require_step: int | None = None,
) -> Iterator["TrainingJob"]:
    """Make a job of a recipe; one that is not a file is written to a temporary file, which processes can load."""
    from hlat.launch import TrainingJob

    options = (profile, allow_faults, require_step)
    _check_kind(recipe)
    if not isinstance(recipe, Recipe):
        yield TrainingJob(str(recipe), tuple(override_words(overrides)), *options)
        return
    if overrides:
        raise LaunchError("overrides change a recipe file while it is loaded: give them to hlat.load_recipe.")
    with TemporaryDirectory(prefix="hlat-") as folder:
        file = Path(folder) / f"{recipe.run.name}.yaml"
        # JSON is YAML: processes load it as any other recipe file.
        # What it leaves open stays open: the processes choose by their devices.
        file.write_text(json.dumps(recipe.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
        yield TrainingJob(str(file), (), *options)


def with_own_parts(
    recipe: Recipe | str | Path, overrides: Overrides, optimizer: Callable[..., Any] | None, components: Sequence[Any]
) -> Recipe:
    """Return a recipe that names objects of this process: an optimizer in place of its own, and more components."""
    found = recipe if isinstance(recipe, Recipe) else read_recipe(recipe, override_words(overrides))
    content = found.model_dump(mode="json")
    if optimizer is not None:
        options = optimizer.keywords if isinstance(optimizer, functools.partial) else {}
        part = optimizer.func if isinstance(optimizer, functools.partial) else optimizer
        # Of another optimizer's fields only those that every optimizer has.
        kept = (
            content["optimizer"]
            if isinstance(found.optimizer, OwnPart)
            else {name: content["optimizer"][name] for name in OptimizerConfig.model_fields}
        )
        content["optimizer"] = {**kept, **options, "kind": own_parts.give_part(part)}
    content["training"]["components"] |= {own_parts.give_part(each): {} for each in components}
    return parse_recipe(_plain_values(content), "the recipe")


def refuse_objects(optimizer: object, components: Sequence[object], on_step: object) -> None:
    """Raise LaunchError if objects of this process are given, for a run of several processes."""
    found = [f"optimizer.kind={own_parts.give_part(optimizer)}"] if optimizer is not None else []
    found += [f"training.components: {{{own_parts.give_part(each)}: {{}}}}" for each in components]
    if found or on_step is not None:
        remedy = (
            f"Put them in a module beside the recipe, and name them there: {', '.join(found)}."
            if found
            else ("Use a training component, in a module that the recipe names (docs/extend.md).")
        )
        raise LaunchError(
            f"optimizer, components and on_step are objects of this process, and others have none. {remedy}"
        )


def optional_text(path: str | Path | None) -> str | None:
    """Return a path as text, as the command line has it; None stays."""
    return None if path is None else str(path)


def override_words(overrides: Overrides) -> list[str]:
    """Return overrides as the command line has them; RecipeError if they are none."""
    if isinstance(overrides, str):
        return [overrides]
    if isinstance(overrides, Sequence) and all(isinstance(word, str) for word in overrides):
        return list(overrides)
    if not isinstance(overrides, Mapping) or not all(isinstance(path, str) for path in overrides):
        reason = f"a {type(overrides).__name__} of this kind holds no overrides."
        remedy = 'Give {"training.steps": 100} or ["training.steps=100"].'
        raise RecipeError([Problem("overrides", reason, remedy, overrides, True)], "the recipe")
    return [f"{path}={_yaml(value)}" for path, value in overrides.items()]


def _yaml(value: object) -> str:
    if isinstance(value, float):
        # With a point, without which YAML takes 1e-3 for a text.
        text = repr(value)
        mantissa, mark, exponent = text.partition("e")
        return f"{mantissa}.0e{exponent}" if mark and "." not in mantissa else text
    return json.dumps(value, default=str)
