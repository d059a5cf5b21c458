"""Loading of a checkpoint into model, optimizer and components.

checkpoint with state of a component    -> loaded in place
checkpoint without it                   -> TrainingComponent.reset, and the component is named in ``StateChanges.begun``
state of a component that is not there  -> not loaded, and named in ``StateChanges.dropped``
"""

from dataclasses import dataclass

from hlat.checkpoint import Checkpoint, extra_names, restore
from hlat.config import Recipe
from hlat.optim import Optimizer
from hlat.parallel import ParallelModel
from hlat.training.components.base import ComponentList


@dataclass(frozen=True)
class StateChanges:
    """Differences between the components of a run and those of the checkpoint that it continues from.

    Attributes:
        begun: names of components that have no state in the checkpoint; they begin with the weights as they are.
        dropped: names of states in the checkpoint that no component continues.
    """

    begun: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


def load_state(
    checkpoint: Checkpoint,
    recipe: Recipe,
    model: ParallelModel,
    optimizer: Optimizer,
    components: ComponentList,
) -> StateChanges:
    """Load weights, optimizer, RNG and components from a checkpoint, in place.

    Raises:
        CheckpointError: tensors are missing or do not fit.
    """
    saved = extra_names(checkpoint)
    wanted = {component: component.state() for component in components}
    found = {component: all(one.name in saved for one in states) for component, states in wanted.items()}
    extra = [one for component, states in wanted.items() if found[component] for one in states]
    restore(checkpoint, recipe.model, model.local_parameters, optimizer, extra)
    begun: list[str] = []
    for component, states in wanted.items():
        if not found[component]:
            component.reset()
            begun += [one.name for one in states]
    names = {one.name for states in wanted.values() for one in states}
    return StateChanges(tuple(begun), tuple(sorted(saved - names)))
