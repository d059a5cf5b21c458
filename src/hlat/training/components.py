"""Training component: something that takes part in a run at fixed points of each step.

    begin -> [ before_step -> the step -> after_step        ] -> at_end
             [                         -> after_rollback    ]
    state -> part of every checkpoint, loaded when the run resumes or rolls back

The loop (``hlat.training.loop``) lists its components in order and calls each hook of all of them in that order.

``load_state`` loads a checkpoint into model, optimizer and components:

    checkpoint with state of a component    -> loaded in place
    checkpoint without it                   -> TrainingComponent.reset; the component is named in ``StateChanges.begun``
    state of a component that is not there  -> not loaded, and named in ``StateChanges.dropped``
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import BaseModel

from hlat.checkpoint import Checkpoint, ExtraState, extra_names, restore
from hlat.config import Recipe, Section
from hlat.optim import Optimizer
from hlat.parallel import ParallelModel
from hlat.resilience import APPLY, StepVerdict
from hlat.runtime.distributed.join import Runtime
from hlat.tracking import OtherRankTracker, Tracker


@dataclass(frozen=True)
class StepResult:
    """Result of a step, the same on every rank. Scalar tensors stay on the device, to avoid synchronization."""

    loss: torch.Tensor  # mean over the tokens of the global batch, in nats
    gradient_norm: torch.Tensor  # before clipping
    learning_rate: float
    verdict: StepVerdict = APPLY
    loss_read: float = math.nan  # the loss as the verdict has read it: another read would wait for the device again


@dataclass(frozen=True)
class LoopStart:
    """Everything that a component is given when the loop begins."""

    recipe: Recipe
    runtime: Runtime
    step: int
    # receives metrics, events and messages; on ranks other than 0 messages go to the rank's log
    tracker: Tracker | OtherRankTracker
    stack: ExitStack  # context managers entered here are left when the loop ends, also by an error


@dataclass(frozen=True)
class StepEnd:
    """Result of a step as components get it, whether it is the last of this process or not."""

    step: int  # its number, counted from 1
    result: StepResult  # loss, gradient norm, learning rate and verdict; tensors stay on the device
    is_last: bool  # True if this process does no further step

    @property
    def loss(self) -> float:
        """Loss of the step in nats, as a number: waits for the device, unless the verdict has read it."""
        return float(self.result.loss) if math.isnan(self.result.loss_read) else self.result.loss_read


class TrainingComponent:
    """Base of training components: every hook does nothing.

    Every rank calls every hook, in the same order, so a hook may be collective. The state must be a function of the
    steps done, or a run that resumes would differ from one that was never interrupted. A hook that raises ends the run.

    Components of other packages are built by ``Kind(options, parameters)``: their validated options, and this rank's
    parameters, whose values are not there yet.
    """

    # pydantic model of the options in training.components.NAME; none by default
    Options: ClassVar[type[BaseModel]] = Section

    def begin(self, start: LoopStart) -> None:
        """Take part from here on: the state is that of the checkpoint that the run resumes from, if there is one."""

    def before_step(self) -> None:
        """Take part before the batch of the next step is read."""

    def after_step(self, end: StepEnd) -> None:
        """Handle a step that is done; components that come before the checkpointer change what it saves."""

    def after_rollback(self, step: int) -> None:
        """Forget the steps after ``step``: the run has returned to it, and the state is that of then."""

    def at_end(self, result: StepResult | None) -> None:
        """Finish after the last step; ``result`` is None if there was no step or it was rolled back."""

    def state(self) -> Sequence[ExtraState]:
        """Return the tensors to be saved, always the same ones; a checkpoint is loaded into them in place."""
        return ()

    def reset(self) -> None:
        """Set the state to that of a run that begins with the weights as they are.

        Called when there is nothing to load: at a run's first step, or if the checkpoint lacks this state.
        """


class ComponentList(TrainingComponent):
    """Several components as one: each hook calls that of all, in order."""

    def __init__(self, components: Sequence[TrainingComponent]) -> None:
        self._components = tuple(components)

    def __iter__(self) -> Iterator[TrainingComponent]:
        return iter(self._components)

    def begin(self, start: LoopStart) -> None:
        for component in self._components:
            component.begin(start)

    def before_step(self) -> None:
        for component in self._components:
            component.before_step()

    def after_step(self, end: StepEnd) -> None:
        for component in self._components:
            component.after_step(end)

    def after_rollback(self, step: int) -> None:
        for component in self._components:
            component.after_rollback(step)

    def at_end(self, result: StepResult | None) -> None:
        for component in self._components:
            component.at_end(result)

    def state(self) -> Sequence[ExtraState]:
        return [state for component in self._components for state in component.state()]

    def reset(self) -> None:
        for component in self._components:
            component.reset()


@dataclass(frozen=True)
class StateChanges:
    """Differences between the components of a run and those of the checkpoint that it continues from."""

    begun: tuple[str, ...] = ()  # components without state in the checkpoint; they begin with the weights as they are
    dropped: tuple[str, ...] = ()  # states in the checkpoint that no component continues


def enters_stage(checkpoint: Checkpoint, recipe: Recipe) -> bool:
    """Return True if a checkpoint was saved in an earlier stage than that of the recipe."""
    stage = checkpoint.meta.get("stage") or {"index": 0}
    return recipe.place is not None and stage["index"] < recipe.place.index


def load_state(
    checkpoint: Checkpoint,
    recipe: Recipe,
    model: ParallelModel,
    optimizer: Optimizer,
    components: ComponentList,
) -> StateChanges:
    """Load weights, optimizer, RNG and components in place; raises CheckpointError if tensors do not fit."""
    saved = extra_names(checkpoint)
    wanted = {component: component.state() for component in components}
    found = {component: all(one.name in saved for one in states) for component, states in wanted.items()}
    extra = [one for component, states in wanted.items() if found[component] for one in states]
    restore(checkpoint, recipe.model, model.local_parameters, optimizer, extra)
    if recipe.place is not None and recipe.place.stage.fresh == "optimizer" and enters_stage(checkpoint, recipe):
        optimizer.state.clear()
    begun: list[str] = []
    for component, states in wanted.items():
        if not found[component]:
            # After the weights are loaded: an average, for example, begins with them.
            component.reset()
            begun += [one.name for one in states]
    names = {one.name for states in wanted.values() for one in states}
    return StateChanges(tuple(begun), tuple(sorted(saved - names)))
