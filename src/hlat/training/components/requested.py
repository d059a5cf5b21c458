"""Components that the recipe asks for.

recipe, local parameters -> BUILT_IN, in order, then training.components (installed.py) -> ComponentList
"""

from collections.abc import Callable, Sequence

from hlat.config import Recipe
from hlat.model import LocalParameter
from hlat.training.components.base import ComponentList, TrainingComponent
from hlat.training.components.ema import weight_average
from hlat.training.components.installed import installed_components

BUILT_IN: tuple[Callable[[Recipe, Sequence[LocalParameter]], TrainingComponent | None], ...] = (weight_average,)
"""Functions that build a component if the recipe asks for it, in the order in which the components are called."""


def requested_components(recipe: Recipe, parameters: Sequence[LocalParameter]) -> ComponentList:
    """Build the components that the recipe asks for.

    Args:
        recipe: recipe of the run, with ``precision.mode`` resolved.
        parameters: this rank's parameters; weights need not be there yet.

    Raises:
        RecipeError: a component of another package cannot be used.
    """
    built = [build(recipe, parameters) for build in BUILT_IN]
    others = [installed.build(parameters) for installed in installed_components(recipe)]
    return ComponentList([*(component for component in built if component is not None), *others])
