"""Training: one optimizer step, and the loop that runs, saves, checks and resumes it."""

from hlat.training.loop import Outcome, run
from hlat.training.run_state import DataProgress, no_progress
from hlat.training.step import accumulate_gradients, update

__all__ = ["DataProgress", "Outcome", "accumulate_gradients", "no_progress", "run", "update"]
