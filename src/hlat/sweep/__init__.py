"""Sweeps: a recipe trained with several values of some fields, as a list of runs with one table and one report.

runs.py       the runs: values, names, folders, overrides, all checked before the first one starts
execution.py  one after the other on this machine, or as a job array; what they have reached
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.sweep.execution import *
    from hlat.sweep.runs import *

__getattr__ = lazily(
    __name__,
    {
        "execution": (
            "SweepResult accelerator_warning array_script ranked run_hlat run_sweep sweep_json sweep_lines "
            "sweep_results"
        ),
        "runs": "Sweep SweepRun plan_sweep",
    },
)
