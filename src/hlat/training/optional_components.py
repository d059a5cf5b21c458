"""Components that the recipe asks for: hlat's own, and those of other packages.

    recipe, local parameters -> BUILT_IN, in order, then training.components -> ComponentList

    training.ema -> WeightAverage, after a step:  average = decay * average + (1 - decay) * weights
                    in fp32, on the device of the weights
                    in a checkpoint:  ema.<canonical name> --> hlat export --weights ema

    training.components: {NAME: {options}}  --entry point NAME--> class --options--> Installed, or problems of all

    # pyproject.toml of such a package
    [project.entry-points."hlat.components"]
    largest-weight = "my_package:LargestWeight"

Polyak and Juditsky 1992 average iterates; the exponential form with a constant decay is the one of Szegedy et al. 2016
(Inception v3, section 8) and of ``torch.optim.swa_utils.get_ema_multi_avg_fn``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from hlat.checkpoint import ExtraState
from hlat.config import Problem, Recipe, RecipeError
from hlat.model import LocalParameter
from hlat.runtime.progress import enter_phase
from hlat.training.components import ComponentList, StepEnd, TrainingComponent


class WeightAverage(TrainingComponent):
    """Average of the rows that this rank stores: as many fp32 elements, sharded as the weights are.

    Up to ``start_step`` the average equals the weights. From then on every multiple of ``every_steps`` updates it,
    unless the optimizer's update was skipped. There is no communication and no wait for the device.
    """

    def __init__(self, decay: float, every_steps: int, start_step: int, parameters: Sequence[LocalParameter]) -> None:
        self._decay, self._every, self._start, self._parameters = decay, every_steps, start_step, parameters
        self._averages = [
            torch.empty_like(each.tensor, dtype=torch.promote_types(each.tensor.dtype, torch.float32))
            for each in parameters
        ]

    def state(self) -> Sequence[ExtraState]:
        return [ExtraState("ema", self._averages)]

    @torch.no_grad()
    def reset(self) -> None:
        for average, each in zip(self._averages, self._parameters, strict=True):
            average.copy_(each.tensor)

    def after_step(self, end: StepEnd) -> None:
        """Update the average, if this step does."""
        if not end.result.verdict.applied:
            return
        if end.step <= self._start:
            self._update(0.0)
        elif end.step % self._every == 0:
            self._update(self._decay)

    @torch.no_grad()
    def _update(self, decay: float) -> None:
        enter_phase("optimizer")
        for average, each in zip(self._averages, self._parameters, strict=True):
            average.lerp_(each.tensor.to(average.dtype), 1.0 - decay)
        enter_phase("between")


def weight_average(recipe: Recipe, parameters: Sequence[LocalParameter]) -> WeightAverage | None:
    """Build the average that ``training.ema`` asks for."""
    ema = recipe.training.ema
    return None if ema is None else WeightAverage(ema.decay, ema.every_steps, ema.start_step, parameters)


GROUP = "hlat.components"
_RESERVED_NAMES = (
    "data",
    "ema",
    "model",
    "optimizer",
    "rng",
)  # first parts of the names of other tensors in a checkpoint


@dataclass(frozen=True)
class Installed:
    """A component class of another package, and its validated options."""

    name: str
    kind: type[TrainingComponent]
    options: BaseModel

    def build(self, parameters: Sequence[LocalParameter]) -> TrainingComponent:
        """Build the component; raises RecipeError if its constructor fails or its state has another name."""
        try:
            component = self.kind(self.options, parameters)  # type: ignore[call-arg]
            names = {state.name for state in component.state()}
        # Code of another package may raise anything.
        except Exception as error:
            raise _refused(self.name, f"it cannot be built: {_error_text(error)}.") from error
        if names - {self.name}:
            found = ", ".join(sorted(names))
            raise _refused(self.name, f"its state is called {found}; it has to be called {self.name}.")
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
            found.append(_load_component(name, options))
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    return found


def _load_component(name: str, options: Mapping[str, Any]) -> Installed:
    if name in _RESERVED_NAMES:
        raise _refused(name, "the name is reserved for hlat's own state.", "Rename the component.")
    # Two packages with the same name: hlat must not choose for the user.
    candidates = entry_points(group=GROUP, name=name)
    if len(candidates) != 1:
        raise _not_one_component(name, list(candidates))
    (entry,) = candidates
    try:
        kind = entry.load()
    except Exception as error:
        reason = f"importing it from {_origin(entry)} failed: {_error_text(error)}."
        raise _refused(name, reason, "Repair that package.") from error
    if not (isinstance(kind, type) and issubclass(kind, TrainingComponent)):
        reason = f"{_origin(entry)} is no subclass of hlat.training.components.TrainingComponent."
        raise _refused(name, reason, "Correct the entry point.")
    try:
        return Installed(name, kind, kind.Options.model_validate(dict(options)))
    except ValidationError as error:
        raise RecipeError([_option_problem(name, kind, detail) for detail in error.errors()]) from error


def _not_one_component(name: str, candidates: list[EntryPoint]) -> RecipeError:
    if candidates:
        origins = " and ".join(sorted(map(_origin, candidates)))
        return _refused(name, f"several packages have a component of this name: {origins}.", "Uninstall all but one.")
    known = sorted({entry.name for entry in entry_points(group=GROUP)})
    installed = f"Installed: {', '.join(known)}." if known else "No installed package has components."
    remedy = f"Install the package that provides it. {installed}"
    return _refused(name, "no installed package has a component of this name.", remedy)


def _option_problem(name: str, kind: type[TrainingComponent], detail: Any) -> Problem:
    path = ".".join(map(str, (name, *detail["loc"])))
    known = ", ".join(kind.Options.model_fields) or "none"
    value = detail["input"]
    return Problem(
        f"training.components.{path}", f"{detail['msg']}.", f"Options: {known}.", value, not isinstance(value, dict)
    )


def _refused(name: str, reason: str, remedy: str = "") -> RecipeError:
    return RecipeError([Problem(f"training.components.{name}", reason, remedy)])


def _origin(entry: EntryPoint) -> str:
    package = f"package {entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
    return f"{package} ({entry.value})"


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


BUILT_IN: tuple[Callable[[Recipe, Sequence[LocalParameter]], TrainingComponent | None], ...] = (weight_average,)
"""Functions that build a component if the recipe asks for it, in the order in which the components are called."""


def requested_components(recipe: Recipe, parameters: Sequence[LocalParameter]) -> ComponentList:
    """Build the components that the recipe asks for, before weights are there; raises RecipeError for a bad one."""
    built = [build(recipe, parameters) for build in BUILT_IN]
    others = [installed.build(parameters) for installed in installed_components(recipe)]
    return ComponentList([*(component for component in built if component is not None), *others])
