"""Training: one optimizer step, and the loop that runs, saves, checks and resumes it."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.training.components import *
    from hlat.training.loop import *
    from hlat.training.numerics import *
    from hlat.training.optional_components import *
    from hlat.training.part_checks import *
    from hlat.training.process import *
    from hlat.training.run_data import *
    from hlat.training.stages import *
    from hlat.training.start import *
    from hlat.training.validation.evaluation import *
    from hlat.training.validation.losses import *
    from hlat.training.validation.tasks import *

__getattr__ = lazily(
    __name__,
    {
        "components": "ComponentList StepEnd TrainingComponent",
        "loop": "Outcome accumulate_gradients run update",
        "numerics": "configure_rounding resolve_determinism resolve_precision",
        "optional_components": "requested_components requested_optimizer",
        "part_checks": "check_own_parts",
        "process": "scheduled_gc",
        "run_data": "DataProgress",
        "stages": "check_fork_stages",
        "start": "RunOrigin run_lock",
        "validation.evaluation": "Evaluation EvaluationResult open_evaluation",
        "validation.losses": "SingleProcessModel ValidationResult validate",
        "validation.tasks": "TaskRequest encode_requests read_requests write_requests",
    },
)
