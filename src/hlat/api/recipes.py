"""Loading of recipes, and jobs made of them.

recipe file, name, mapping or Recipe, overrides --> Recipe, TrainingJob
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hlat.api.arguments import checks_arguments
from hlat.config import Problem, Recipe, RecipeError, parse_recipe
from hlat.config import load_recipe as read_recipe
from hlat.runtime.errors import LaunchError

if TYPE_CHECKING:
    from hlat.launch import TrainingJob

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
    """Raise RecipeError unless this can be a recipe at all."""
    if not isinstance(recipe, str | Path | Mapping | Recipe):
        reason = f"a {type(recipe).__name__} is no recipe."
        remedy = "Give the path of a recipe file, the name of a shipped recipe, or its sections as a mapping."
        raise RecipeError([Problem("the recipe", reason, remedy, recipe, True)], "the recipe")


def _plain_values(sections: Mapping[str, object]) -> dict[str, Any]:
    """Turn sections into what YAML would have given: lists for tuples, and texts for paths."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(sections), default=str))
    except (TypeError, ValueError, RecursionError) as error:  # keys that are no texts, cycles
        raise RecipeError([Problem("the recipe", f"has values that no recipe file can hold: {error}.")]) from error
    return plain


@checks_arguments
def draft_recipe(
    texts: str | Path,
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
        texts: the corpus: a file, folder or glob.
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

    given, kind = (None if path is None else str(path) for path in (start, model))
    return draft(str(texts), name=name, hours=hours, column=column, start=given, model=kind, device=device)


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
        file.write_text(json.dumps(recipe.model_dump(mode="json")), encoding="utf-8")
        yield TrainingJob(str(file), (), *options)


def override_words(overrides: Overrides) -> list[str]:
    """Overrides as the command line has them."""
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
    """Write a value as YAML on one line; floats always have a point, without which YAML takes 1e-3 for a text."""
    if isinstance(value, float):
        text = repr(value)
        mantissa, mark, exponent = text.partition("e")
        return f"{mantissa}.0e{exponent}" if mark and "." not in mantissa else text
    return json.dumps(value, default=str)
