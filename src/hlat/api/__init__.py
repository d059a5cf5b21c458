"""The Python API: one function per verb of the command line (docs/python.md).

    draft_recipe, load_recipe
                -> train -> evaluate, watch, average, generate, load_model, export        metrics, report, runs
                -> plan, rehearse, train_ladder
                -> doctor
                -> compile_cache, unpack_cache
                -> submit_slurm, submit_kubernetes, launch_local: train on several hosts

Nothing is printed but the line of progress of ``train``, on a terminal or in a notebook: messages are log records of
the logger ``hlat``. Mistakes are ``HlatError``s. What computing needs in a process (environment variables, settings of
torch, random generators, signal handlers) is restored when a function returns or raises.
"""

import logging
from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.api.checkpoints import *
    from hlat.api.hosts import *
    from hlat.api.planning import *
    from hlat.api.recipes import *
    from hlat.api.records import *
    from hlat.api.training import *

__getattr__ = lazily(
    __name__,
    {
        "checkpoints": "average evaluate evaluate_tasks export fork generate import_model load_model watch",
        "hosts": "doctor launch_local submit_kubernetes submit_slurm",
        "planning": "choose_cluster choose_model_size compare_plans plan plan_grid train_ladder",
        "recipes": "draft_recipe load_recipe",
        "records": "compare_runs metrics report runs show_run",
        "training": "TrainingResult compile_cache rehearse train unpack_cache",
    },
)


logging.getLogger("hlat").addHandler(logging.NullHandler())  # quiet unless the program configures logging
