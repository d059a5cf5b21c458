"""Sweeps: a recipe trained with several values of some fields, as a list of runs with one table and one report.

axes.py     the values, as the command line gives them
runs.py     the runs: names, folders, overrides, all checked before the first one starts
running.py  one after the other on this machine
slurm.py    or as a job array
table.py    what they have reached
"""

from hlat.sweep.running import SweepResult, run_sweep, sweep_results
from hlat.sweep.runs import Sweep, plan_sweep
from hlat.sweep.slurm import accelerator_warning, array_script
from hlat.sweep.table import ranked, sweep_json, sweep_lines

__all__ = [
    "Sweep",
    "SweepResult",
    "accelerator_warning",
    "array_script",
    "plan_sweep",
    "ranked",
    "run_sweep",
    "sweep_json",
    "sweep_lines",
    "sweep_results",
]
