"""The step and the loop: the one place where the story of a run is told in order."""

from hlat.training.loop import Outcome, run
from hlat.training.run_state import DataProgress, no_progress
from hlat.training.step import accumulate_gradients, update
from hlat.training.validation import validate_alone

__all__ = ["DataProgress", "Outcome", "accumulate_gradients", "no_progress", "run", "update", "validate_alone"]
