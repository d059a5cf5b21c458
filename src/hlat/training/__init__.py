"""Training: one optimizer step, and the loop that runs, saves, checks and resumes it."""

from hlat.training.attempt_record import RunOrigin
from hlat.training.loop import Outcome, run
from hlat.training.precision import configure_rounding, resolve_determinism, resolve_precision
from hlat.training.run_state import DataProgress, no_progress
from hlat.training.step import accumulate_gradients, update

__all__ = [
    "DataProgress",
    "Outcome",
    "RunOrigin",
    "accumulate_gradients",
    "configure_rounding",
    "no_progress",
    "resolve_determinism",
    "resolve_precision",
    "run",
    "update",
]
