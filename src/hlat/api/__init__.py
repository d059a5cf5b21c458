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

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.api.checkpoints import average as average
    from hlat.api.checkpoints import evaluate as evaluate
    from hlat.api.checkpoints import evaluate_tasks as evaluate_tasks
    from hlat.api.checkpoints import export as export
    from hlat.api.checkpoints import generate as generate
    from hlat.api.checkpoints import import_model as import_model
    from hlat.api.checkpoints import load_model as load_model
    from hlat.api.checkpoints import watch as watch
    from hlat.api.hosts import doctor as doctor
    from hlat.api.hosts import launch_local as launch_local
    from hlat.api.hosts import submit_kubernetes as submit_kubernetes
    from hlat.api.hosts import submit_slurm as submit_slurm
    from hlat.api.planning import choose_cluster as choose_cluster
    from hlat.api.planning import choose_model_size as choose_model_size
    from hlat.api.planning import compare_plans as compare_plans
    from hlat.api.planning import plan as plan
    from hlat.api.recipes import draft_recipe as draft_recipe
    from hlat.api.recipes import load_recipe as load_recipe
    from hlat.api.records import compare_runs as compare_runs
    from hlat.api.records import metrics as metrics
    from hlat.api.records import report as report
    from hlat.api.records import runs as runs
    from hlat.api.records import show_run as show_run
    from hlat.api.training import TrainingResult as TrainingResult
    from hlat.api.training import compile_cache as compile_cache
    from hlat.api.training import rehearse as rehearse
    from hlat.api.training import train as train
    from hlat.api.training import unpack_cache as unpack_cache

__getattr__ = lazily(
    __name__,
    {
        "checkpoints": "average evaluate evaluate_tasks export generate import_model load_model watch",
        "hosts": "doctor launch_local submit_kubernetes submit_slurm",
        "planning": "choose_cluster choose_model_size compare_plans plan",
        "recipes": "draft_recipe load_recipe",
        "records": "compare_runs metrics report runs show_run",
        "training": "TrainingResult compile_cache rehearse train unpack_cache",
    },
)


logging.getLogger("hlat").addHandler(logging.NullHandler())  # quiet unless the program configures logging
