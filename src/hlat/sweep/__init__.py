"""Sweeps: a recipe trained with several values of some fields, as a list of runs with one table and one report.

axes.py     the values, as the command line gives them
runs.py     the runs: names, folders, overrides, all checked before the first one starts
running.py  one after the other on this machine
slurm.py    or as a job array
table.py    what they have reached
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.sweep.running import SweepResult as SweepResult
    from hlat.sweep.running import run_sweep as run_sweep
    from hlat.sweep.running import sweep_results as sweep_results
    from hlat.sweep.runs import Sweep as Sweep
    from hlat.sweep.runs import plan_sweep as plan_sweep
    from hlat.sweep.slurm import accelerator_warning as accelerator_warning
    from hlat.sweep.slurm import array_script as array_script
    from hlat.sweep.table import ranked as ranked
    from hlat.sweep.table import sweep_json as sweep_json
    from hlat.sweep.table import sweep_lines as sweep_lines

__getattr__ = lazily(
    __name__,
    {
        "running": "SweepResult run_sweep sweep_results",
        "runs": "Sweep plan_sweep",
        "slurm": "accelerator_warning array_script",
        "table": "ranked sweep_json sweep_lines",
    },
)
