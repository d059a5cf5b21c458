"""The step and the loop: the one place where the story of a run is told in order."""

from hlat.training.job import DataProgress, no_progress
from hlat.training.lock import run_lock
from hlat.training.loop import Outcome, run
from hlat.training.validation import ValidationResult, validate_alone

__all__ = ["DataProgress", "Outcome", "ValidationResult", "no_progress", "run", "run_lock", "validate_alone"]
