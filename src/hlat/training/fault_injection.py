"""Injection of the recipe's faults into a training run."""

from collections.abc import Iterator
from contextlib import contextmanager

from hlat.resilience import FaultInjector
from hlat.runtime.process import observe_phases
from hlat.training.faulty_disk import fault_folder
from hlat.training.run_state import RunState


@contextmanager
def injected_faults(state: RunState) -> Iterator[FaultInjector]:
    """Inject this rank's faults at phase changes inside the block."""
    recipe = state.recipe
    faults = FaultInjector(recipe.faults, state.runtime.ranks, fault_folder(recipe), recipe.batches)
    faults.set_parameters(state.model.local_parameters)
    with observe_phases(faults):
        yield faults
