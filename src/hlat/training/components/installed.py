"""Components of other packages, found through the entry point group ``hlat.components``.

training.components: {NAME: {options}}  --entry point NAME--> class --options--> Installed, or problems of all

# pyproject.toml of such a package
[project.entry-points."hlat.components"]
largest-weight = "my_package:LargestWeight"
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import BaseModel, ValidationError

from hlat.config import Problem, Recipe, RecipeError
from hlat.model import LocalParameter
from hlat.training.components.base import TrainingComponent

GROUP = "hlat.components"
_RESERVED = ("data", "ema", "model", "optimizer", "rng")  # first parts of the names of other tensors in a checkpoint


@dataclass(frozen=True)
class Installed:
    """A component class of another package, and its validated options."""

    name: str
    kind: type[TrainingComponent]
    options: BaseModel

    def build(self, parameters: Sequence[LocalParameter]) -> TrainingComponent:
        """Build the component.

        Raises:
            RecipeError: its constructor failed, or its state has another name than the component.
        """
        try:
            component = self.kind(self.options, parameters)  # type: ignore[call-arg]
            names = {state.name for state in component.state()}
        except Exception as error:
            raise RecipeError([_problem(self.name, f"it cannot be built: {_text(error)}.")]) from error
        if names - {self.name}:
            found = ", ".join(sorted(names))
            raise RecipeError([_problem(self.name, f"its state is called {found}; it has to be called {self.name}.")])
        return component


def installed_components(recipe: Recipe) -> list[Installed]:
    """Import the classes of ``training.components`` and validate their options.

    Raises:
        RecipeError: lists everything wrong: no such component, a failing import (with its package), invalid options.
    """
    found: list[Installed] = []
    problems: list[Problem] = []
    for name, options in recipe.training.components.items():
        try:
            found.append(_load(name, options))
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    return found


def _load(name: str, options: Mapping[str, Any]) -> Installed:
    if name in _RESERVED:
        raise RecipeError([_problem(name, "the name is reserved for hlat's own state.", "Rename the component.")])
    candidates = entry_points(group=GROUP, name=name)
    if len(candidates) != 1:
        raise RecipeError([_not_one(name, list(candidates))])
    (entry,) = candidates
    try:
        kind = entry.load()
    except Exception as error:
        raise RecipeError(
            [_problem(name, f"importing it from {_origin(entry)} failed: {_text(error)}.", "Repair that package.")]
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, TrainingComponent)):
        reason = f"{_origin(entry)} is no subclass of hlat.training.components.base.TrainingComponent."
        raise RecipeError([_problem(name, reason, "Correct the entry point.")])
    try:
        return Installed(name, kind, kind.Options.model_validate(dict(options)))
    except ValidationError as error:
        raise RecipeError([_option_problem(name, kind, detail) for detail in error.errors()]) from error


def _not_one(name: str, candidates: list[EntryPoint]) -> Problem:
    if candidates:
        origins = " and ".join(sorted(map(_origin, candidates)))
        return _problem(name, f"several packages have a component of this name: {origins}.", "Uninstall all but one.")
    known = sorted({entry.name for entry in entry_points(group=GROUP)})
    installed = f"Installed: {', '.join(known)}." if known else "No installed package has components."
    remedy = f"Install the package that provides it. {installed}"
    return _problem(name, "no installed package has a component of this name.", remedy)


def _option_problem(name: str, kind: type[TrainingComponent], detail: Any) -> Problem:
    path = ".".join(map(str, (name, *detail["loc"])))
    known = ", ".join(kind.Options.model_fields) or "none"
    value = detail["input"]
    return Problem(
        f"training.components.{path}", f"{detail['msg']}.", f"Options: {known}.", value, not isinstance(value, dict)
    )


def _problem(name: str, reason: str, remedy: str = "") -> Problem:
    return Problem(f"training.components.{name}", reason, remedy)


def _origin(entry: EntryPoint) -> str:
    package = f"package {entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
    return f"{package} ({entry.value})"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
