"""Sweeps: a recipe trained with several values of some fields, as a list of runs with one table and one report.

runs.py       the runs: values, names, folders, overrides, all checked before the first one starts
execution.py  one after the other on this machine, or as a job array; what they have reached
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.sweep.execution import SweepResult as SweepResult
    from hlat.sweep.execution import accelerator_warning as accelerator_warning
    from hlat.sweep.execution import array_script as array_script
    from hlat.sweep.execution import ranked as ranked
    from hlat.sweep.execution import run_sweep as run_sweep
    from hlat.sweep.execution import sweep_json as sweep_json
    from hlat.sweep.execution import sweep_lines as sweep_lines
    from hlat.sweep.execution import sweep_results as sweep_results
    from hlat.sweep.runs import Sweep as Sweep
    from hlat.sweep.runs import plan_sweep as plan_sweep

__getattr__ = lazily(
    __name__,
    {
        "execution": (
            "SweepResult accelerator_warning array_script ranked run_sweep sweep_json sweep_lines sweep_results"
        ),
        "runs": "Sweep plan_sweep",
    },
)
