"""Components that the recipe asks for: hlat's own, and those of the user.

    recipe, local parameters -> BUILT_IN, in order, then training.components -> ComponentList

    training.ema -> WeightAverage, after a step:  average = decay * average + (1 - decay) * weights
                    in fp32, on the device of the weights
                    in a checkpoint:  ema.<canonical name> --> hlat export --weights ema

    training.components: {NAME: {options}}  --load_part--> class --options--> Installed, or problems of all

Polyak and Juditsky 1992 average iterates; the exponential form with a constant decay is the one of Szegedy et al. 2016
(Inception v3, section 8) and of ``torch.optim.swa_utils.get_ema_multi_avg_fn``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel

from hlat.checkpoint import ExtraState
from hlat.config import Problem, Recipe, RecipeError, own_parts
from hlat.model import LocalParameter
from hlat.optim import Optimizer, build_optimizer
from hlat.parallel import ParallelModel
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


class StepObserver(TrainingComponent):
    """A function that is called after each step."""

    def __init__(self, observe: Callable[[StepEnd], object]) -> None:
        self._observe = observe

    def after_step(self, end: StepEnd) -> None:
        self._observe(end)


_RESERVED_NAMES = ("data", "ema", "model", "optimizer", "rng")
"""First parts of the names of other tensors in a checkpoint."""


@dataclass(frozen=True)
class Installed:
    """A component of the user's: its class, or a finished object, and its validated options."""

    name: str  # in the recipe
    part: type[TrainingComponent] | TrainingComponent
    options: BaseModel

    def build(self, parameters: Sequence[LocalParameter]) -> TrainingComponent:
        """Build the component; raises RecipeError if its constructor fails or its state has another name."""
        try:
            part = self.part
            component = part(self.options, parameters) if isinstance(part, type) else part  # type: ignore[call-arg]
            names = {state.name for state in component.state()}
        # Code of another package may raise anything.
        except Exception as error:
            raise _refused(self.name, f"it cannot be built: {type(error).__name__}: {error}.") from error
        # The name of an entry point is one's own; a class that is named by its module chooses a name that is free.
        wrong = names & {*_RESERVED_NAMES} if ":" in self.name else names - {self.name}
        if wrong:
            free = "something else" if ":" in self.name else self.name
            raise _refused(self.name, f"its state is called {', '.join(sorted(wrong))}; it has to be called {free}.")
        return component


def installed_components(recipe: Recipe) -> list[Installed]:
    """Import the classes of ``training.components`` and validate their options.

    Raises:
        RecipeError: lists everything wrong: no such component, a failing import, invalid options.
    """
    found: list[Installed] = []
    checks = [partial(_load_component, found, name, values) for name, values in recipe.training.components.items()]
    if problems := own_parts.gather_problems(checks):
        raise RecipeError(problems)
    return found


def _load_component(found: list[Installed], name: str, values: Mapping[str, Any]) -> None:
    path = f"training.components.{name}"
    if name in _RESERVED_NAMES:
        raise _refused(name, "the name is reserved for hlat's own state.", "Rename the component.")
    part = own_parts.load_part(
        own_parts.COMPONENTS, path, name, "a subclass of hlat.training.components.TrainingComponent", _is_component
    )
    found.append(Installed(name, part, own_parts.read_options(part.Options, values, path)))


def _is_component(part: Any) -> bool:
    return isinstance(part, TrainingComponent) or (isinstance(part, type) and issubclass(part, TrainingComponent))


def _refused(name: str, reason: str, remedy: str = "") -> RecipeError:
    return RecipeError([Problem(f"training.components.{name}", reason, remedy)])


BUILT_IN: tuple[Callable[[Recipe, Sequence[LocalParameter]], TrainingComponent | None], ...] = (weight_average,)
"""Functions that build a component if the recipe asks for it, in the order in which the components are called."""


def requested_optimizer(recipe: Recipe, model: ParallelModel) -> Optimizer:
    """Build the optimizer of this rank's parameters that a recipe asks for."""
    precision = recipe.precision
    return build_optimizer(
        model.local_parameters,
        recipe.optimizer,
        precision.mode,
        recipe.training.seed,
        model.matrices,
        precision.in_hardware,
    )


def requested_components(recipe: Recipe, parameters: Sequence[LocalParameter]) -> ComponentList:
    """Build the components that the recipe asks for, before weights are there; raises RecipeError for a bad one."""
    built = [build(recipe, parameters) for build in BUILT_IN]
    others = {installed.name: installed.build(parameters) for installed in installed_components(recipe)}
    owners: dict[str, str] = {}
    for name, component in others.items():
        for state in component.state():
            if (other := owners.setdefault(state.name, name)) != name:
                raise _refused(name, f"its state is called {state.name}, as that of {other} is.", "Rename one.")
    return ComponentList([*(component for component in built if component is not None), *others.values()])
