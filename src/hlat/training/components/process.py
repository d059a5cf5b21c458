"""Components that act on the process, not on the model: the profiler and the garbage collector."""

from hlat.training.components.base import LoopStart, StepEnd, TrainingComponent
from hlat.training.process.gc_control import scheduled_gc
from hlat.training.process.profile import profile_steps


class Profiler(TrainingComponent):
    """Profiles steps 4 to 6 of this process (``hlat train --profile``).

    Args:
        wanted: False does nothing.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted

    def begin(self, start: LoopStart) -> None:
        """Start the profiler."""
        folder, rank = start.recipe.run_dir / "profile", start.runtime.rank
        self._step = start.stack.enter_context(profile_steps(self._wanted, folder, rank, start.tracker.message))

    def after_step(self, end: StepEnd) -> None:
        """Count the step; after the last profiled one trace and table are written."""
        self._step()


class GarbageCollector(TrainingComponent):
    """Runs Python's garbage collector after the same steps on every rank."""

    def begin(self, start: LoopStart) -> None:
        """Take over from the automatic collection."""
        self._collection = start.stack.enter_context(scheduled_gc())

    def after_step(self, end: StepEnd) -> None:
        """Collect, after every 100th step."""
        self._collection.after_step(end.step)
