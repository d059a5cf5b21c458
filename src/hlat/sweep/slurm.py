"""A sweep as a job array of Slurm: one element for each run.

    sbatch SCRIPT -> elements 0 ... N-1, at most so many at once -> hlat sweep ... --only $SLURM_ARRAY_TASK_ID

An element that fails may be given to Slurm again; runs that are finished are left alone.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hlat.runtime import slurm
from hlat.runtime.backend.table import expects_accelerator
from hlat.runtime.errors import LaunchError
from hlat.runtime.terminal_text import line_problems
from hlat.sweep.runs import Sweep


def array_script(
    sweep: Sweep, words: Sequence[str], options: Sequence[str], at_once: int | None
) -> tuple[str, list[Path]]:
    """Return the batch script of a sweep, and the folders of its output, which Slurm does not make.

    Args:
        sweep: the sweep.
        words: arguments of ``hlat sweep`` after the recipe: axes, overrides and options, without --slurm.
        options: options of sbatch, as in --time=2:00:00.
        at_once: elements that may run at the same time; None for no limit.

    Raises:
        LaunchError: an option is wrong; every problem is listed.
    """
    limit = "" if at_once is None else f"%{at_once}"
    folder, name = sweep.folder.absolute(), sweep.folder.name
    output = f"--output={str(folder).replace('%', '%%')}/slurm-%a.out"
    head = [f"--job-name={name}", f"--array=0-{len(sweep.runs) - 1}{limit}", output, *options]
    command = [sys.executable, "-P", "-m", "hlat", "sweep", sweep.recipe, *words, "--to", str(sweep.folder)]
    folders, unfit = slurm.output_folders(head, name, Path.cwd())
    named = {"the working folder": str(Path.cwd()), "--to": str(folder), "recipe": sweep.recipe}
    problems = [*slurm.option_problems("sbatch", options), *unfit]
    problems += [found for what, text in named.items() for found in line_problems(what, text)]
    problems += [found for word in words for found in line_problems("argument", word)]
    if problems:
        raise LaunchError("\n".join(problems))
    text = "\n".join(
        [
            "#!/bin/bash",
            *map(slurm.directive, head),
            f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
            # srun is not used: each element is one task on one node
            "unset SLURM_NTASKS SLURM_PROCID",
            f'exec {shlex.join(command)} --only "$SLURM_ARRAY_TASK_ID"',
            "",
        ]
    )
    return text, folders


def accelerator_warning(sweep: Sweep, options: Sequence[str], processes: int) -> str | None:
    """Return a warning if elements of the array reserve no accelerators although a run may want one; else None.

    Args:
        sweep: the sweep.
        options: options of sbatch.
        processes: processes of each run.
    """
    # A login node, where this is asked, knows nothing of the devices that ``auto`` finds on a compute node.
    wants = any(run.device == "auto" or expects_accelerator(run.device) for run in sweep.runs)
    if not wants or slurm.asks_for_accelerators(options):
        return None
    return (
        "warning: the job asks Slurm for no accelerators, and without any its runs train on the CPUs. Add "
        f"--sbatch=--gpus-per-node={processes}, or say run.device=cpu; nothing is missing on a cluster whose nodes "
        "give theirs to every job."
    )
