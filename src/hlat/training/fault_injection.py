"""The faults of a recipe, put where they happen."""

from collections.abc import Iterator
from contextlib import contextmanager

from hlat.resilience import Faults
from hlat.runtime.process import observe_phases
from hlat.training.faulty_disk import fault_folder
from hlat.training.run_state import Job


@contextmanager
def injected_faults(job: Job) -> Iterator[Faults]:
    """Have the faults of this rank happen in the steps that follow."""
    recipe = job.recipe
    faults = Faults(recipe.faults, job.runtime.ranks, fault_folder(recipe), recipe.batch.global_batch)
    faults.attach(job.model.held)
    with observe_phases(faults):
        yield faults
