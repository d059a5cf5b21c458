"""The Python API: one function per verb of the command line (docs/python.md).

    draft_recipe, load_recipe
                -> train -> evaluate, watch, average, generate, load_model, export        metrics, report, runs
                -> plan, rehearse
                -> doctor
                -> compile_cache, unpack_cache
                -> submit_slurm, submit_kubernetes, launch_local: train on several hosts

Nothing is printed: progress and messages are log records of the logger ``hlat``. Mistakes are ``HlatError``s. What
computing needs in a process (environment variables, settings of torch, random generators, signal handlers) is restored
when a function returns or raises.
"""

import logging
from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.api.checkpoints import evaluate, evaluate_tasks, generate, load_model, watch
    from hlat.api.compilation import compile_cache, unpack_cache
    from hlat.api.hosts import launch_local
    from hlat.api.models import average, export, import_model
    from hlat.api.planning import choose_cluster, choose_model_size, compare_plans, plan
    from hlat.api.preflight import doctor
    from hlat.api.recipes import draft_recipe, load_recipe
    from hlat.api.records import compare_runs, metrics, report, runs, show_run
    from hlat.api.submission import submit_kubernetes, submit_slurm
    from hlat.api.training import TrainingResult, rehearse, train

__getattr__ = lazily(
    __name__,
    {
        "checkpoints": (
            "evaluate",
            "evaluate_tasks",
            "generate",
            "load_model",
            "watch",
        ),
        "compilation": (
            "compile_cache",
            "unpack_cache",
        ),
        "hosts": ("launch_local",),
        "models": (
            "average",
            "export",
            "import_model",
        ),
        "planning": (
            "choose_cluster",
            "choose_model_size",
            "compare_plans",
            "plan",
        ),
        "preflight": ("doctor",),
        "recipes": ("draft_recipe", "load_recipe"),
        "records": (
            "compare_runs",
            "metrics",
            "report",
            "runs",
            "show_run",
        ),
        "submission": (
            "submit_kubernetes",
            "submit_slurm",
        ),
        "training": (
            "TrainingResult",
            "rehearse",
            "train",
        ),
    },
)

__all__ = [
    "TrainingResult",
    "average",
    "choose_cluster",
    "choose_model_size",
    "compare_plans",
    "compare_runs",
    "compile_cache",
    "doctor",
    "draft_recipe",
    "evaluate",
    "evaluate_tasks",
    "export",
    "generate",
    "import_model",
    "launch_local",
    "load_model",
    "load_recipe",
    "metrics",
    "plan",
    "rehearse",
    "report",
    "runs",
    "show_run",
    "submit_kubernetes",
    "submit_slurm",
    "train",
    "unpack_cache",
    "watch",
]

logging.getLogger("hlat").addHandler(logging.NullHandler())  # quiet unless the program configures logging
