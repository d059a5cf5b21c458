"""Injection of the recipe's faults into a training run."""

from hlat.resilience import FaultInjector
from hlat.runtime.process.phase import observe_phases
from hlat.training.components.base import LoopStart, TrainingComponent
from hlat.training.faulty_disk import fault_folder
from hlat.training.run_state import RunState


class FaultInjection(TrainingComponent):
    """Injects this rank's faults at changes of phase."""

    def __init__(self, state: RunState) -> None:
        recipe = state.recipe
        self._state = state
        self._faults = FaultInjector(recipe.faults, state.runtime.ranks, fault_folder(recipe), recipe.batches)

    def begin(self, start: LoopStart) -> None:
        """Observe the phases."""
        self._faults.set_parameters(self._state.model.local_parameters)
        start.stack.enter_context(observe_phases(self._faults))

    def before_step(self) -> None:
        """Record the number of the next step, and the first sample of its batch."""
        step = self._state.step
        self._faults.begin_step(step + 1, self._state.anomalies.skipped.next_step_start(step))
