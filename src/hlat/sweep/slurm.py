"""A sweep as a job array of Slurm: one element for each run.

    sbatch SCRIPT -> elements 0 ... N-1, at most so many at once -> hlat sweep ... --only $SLURM_ARRAY_TASK_ID

An element that fails may be given to Slurm again; runs that are finished are left alone.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hlat.runtime import LaunchError
from hlat.sweep.runs import Sweep


def array_script(sweep: Sweep, words: Sequence[str], options: dict[str, str], at_once: int | None) -> str:
    """Return the batch script of a sweep.

    Args:
        sweep: the sweep.
        words: arguments of ``hlat sweep`` after the recipe: axes, overrides and options, without --slurm.
        options: options of sbatch by name, without dashes.
        at_once: elements that may run at the same time; None for no limit.

    Raises:
        LaunchError: a value has a line break.
    """
    if any("\n" in value for value in options.values()):
        raise LaunchError("an option of sbatch has a line break; remove it.")
    limit = "" if at_once is None else f"%{at_once}"
    folder = sweep.folder.absolute()
    head = {
        "job-name": f"{sweep.folder.name}",
        "array": f"0-{len(sweep.runs) - 1}{limit}",
        "output": str(folder / "slurm-%a.out"),
        **options,
    }
    command = [sys.executable, "-P", "-m", "hlat", "sweep", sweep.recipe, *words, "--to", str(sweep.folder)]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{name}={shlex.quote(value)}" for name, value in head.items()),
            f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
            # srun is not used: each element is one task on one node
            "unset SLURM_NTASKS SLURM_PROCID",
            f'exec {shlex.join(command)} --only "$SLURM_ARRAY_TASK_ID"',
            "",
        ]
    )
