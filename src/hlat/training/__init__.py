"""The step and the loop: the one place where the story of a run is told in order."""

from hlat.training.garbage import controlled_garbage
from hlat.training.job import DataProgress, no_progress
from hlat.training.lock import run_lock
from hlat.training.loop import Outcome, run
from hlat.training.step import StepResult, accumulate_gradients, update
from hlat.training.validation import ValidationResult, validate_alone

__all__ = [
    "DataProgress",
    "Outcome",
    "StepResult",
    "ValidationResult",
    "accumulate_gradients",
    "controlled_garbage",
    "no_progress",
    "run",
    "run_lock",
    "update",
    "validate_alone",
]
