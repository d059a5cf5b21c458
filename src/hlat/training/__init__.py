"""Training: one optimizer step, and the loop that runs, saves, checks and resumes it."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.training.components import ComponentList as ComponentList
    from hlat.training.components import StepEnd as StepEnd
    from hlat.training.loop import Outcome as Outcome
    from hlat.training.loop import accumulate_gradients as accumulate_gradients
    from hlat.training.loop import run as run
    from hlat.training.loop import update as update
    from hlat.training.numerics import configure_rounding as configure_rounding
    from hlat.training.numerics import resolve_determinism as resolve_determinism
    from hlat.training.numerics import resolve_precision as resolve_precision
    from hlat.training.optional_components import installed_components as installed_components
    from hlat.training.optional_components import requested_components as requested_components
    from hlat.training.process import scheduled_gc as scheduled_gc
    from hlat.training.run_state import DataProgress as DataProgress
    from hlat.training.run_state import no_progress as no_progress
    from hlat.training.start import RunOrigin as RunOrigin
    from hlat.training.start import run_lock as run_lock
    from hlat.training.validation.evaluation import Evaluation as Evaluation
    from hlat.training.validation.evaluation import EvaluationResult as EvaluationResult
    from hlat.training.validation.evaluation import open_evaluation as open_evaluation
    from hlat.training.validation.losses import SingleProcessModel as SingleProcessModel
    from hlat.training.validation.losses import ValidationResult as ValidationResult
    from hlat.training.validation.losses import validate as validate
    from hlat.training.validation.tasks import TaskRequest as TaskRequest
    from hlat.training.validation.tasks import encode_requests as encode_requests
    from hlat.training.validation.tasks import read_requests as read_requests
    from hlat.training.validation.tasks import write_requests as write_requests

__getattr__ = lazily(
    __name__,
    {
        "components": "ComponentList StepEnd",
        "loop": "Outcome accumulate_gradients run update",
        "numerics": "configure_rounding resolve_determinism resolve_precision",
        "optional_components": "installed_components requested_components",
        "process": "scheduled_gc",
        "run_state": "DataProgress no_progress",
        "start": "RunOrigin run_lock",
        "validation.evaluation": "Evaluation EvaluationResult open_evaluation",
        "validation.losses": "SingleProcessModel ValidationResult validate",
        "validation.tasks": "TaskRequest encode_requests read_requests write_requests",
    },
)
