"""The step and the loop: the one place where the story of a run is told in order."""

from hlat.training.loop import Outcome, run
from hlat.training.validation import ValidationResult, validate

__all__ = ["Outcome", "ValidationResult", "run", "validate"]
