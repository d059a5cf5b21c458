"""The batch script of a run for Slurm.

    allocation --srun--> `hlat train` on each node, which starts its processes --highest exit code--> the script
        75 (saved)   one job: the script queues its job again      a chain: the next job of the array goes on
        0, 2, 4      the end: the rest of a chain is cancelled     (finished, mistake of the user, diverged)
        others       the end of this job                           a chain: the next job of the array tries again

The supervisors of the nodes restart the run within the job, whichever node is lost (docs/hosts.md). A node that Slurm
sets down ends the job, which is queued again, unless the run may go on with fewer nodes: then the job keeps the others.

A chain is a job array of which one element runs at a time. It needs one submission, has one id to watch and to cancel,
and is one script that can be printed; jobs with dependencies (``afterany``) need the id of each one before.
"""

import logging
import re
import shlex
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from hlat.config import Recipe
from hlat.launch.submission.preflight_step import preflight_step
from hlat.launch.submission.request import PreparedRun, RunRequest
from hlat.runtime import slurm
from hlat.runtime.backend.table import expects_accelerator
from hlat.runtime.process.exit_codes import REQUEUE_CODE
from hlat.runtime.terminal_text import escape_controls, line_problems

_logger = logging.getLogger(__name__)
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+|\d+-\d+:\d\d|\d+-\d+:\d\d:\d\d")  # man sbatch, --time
_LAST_CODES = "0|2|4"  # after these the same command again would end the same way

_PREPARE = r"""
# The end of the job, which not every version of Slurm tells, and the addresses of the nodes, whose names may not
# resolve: containers have no squeue and scontrol to ask.
id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
end=$(SLURM_TIME_FORMAT=standard squeue -h -j "${id:-$SLURM_JOB_ID}" -o %e)
end=$(date -d "$end" +%s 2>/dev/null) && export SLURM_JOB_END_TIME="${SLURM_JOB_END_TIME:-$end}"
HLAT_ADDRESSES=$(scontrol show node "$SLURM_JOB_NODELIST" -o |
  sed -n 's/^NodeName=\([^ ]*\) .*NodeAddr=\([^ ]*\) .*/\1=\2/p' | tr '\n' ' ')
export HLAT_ADDRESSES
"""
_REQUEUE = f"""
if [ "$code" -eq {REQUEUE_CODE} ]; then
  scontrol requeue "$SLURM_JOB_ID" || echo "saved, but Slurm does not queue this job again: submit it again" >&2
fi
"""
_CHAIN = f"""
case $code in
  {_LAST_CODES}) scancel --state=PENDING "$SLURM_ARRAY_JOB_ID" ;;
esac
"""


@dataclass(frozen=True)
class SlurmOptions:
    """Options of Slurm.

    Attributes:
        time: time limit of a job, as sbatch takes it; None for the partition's.
        chain: jobs that run one after the other until the run ends; None for one job that is queued again.
        partition: partition.
        account: account to charge.
        qos: quality of service.
        exclude: nodes not to use, in Slurm's notation.
        cpus_per_task: CPU cores of each process; None for Slurm's default.
        output: file for the output of the script; Slurm replaces %j, %x and others.
        sbatch: further options of sbatch, such as ``--reservation=x``.
        srun: further options of srun, such as ``--container-image=x``.
        setup: shell commands that the script runs first, such as ``module load cuda``.
        doctor: examine the nodes before the training, and leave bad ones out.
    """

    time: str | None = None
    chain: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    exclude: str | None = None
    cpus_per_task: int | None = None
    output: str = "%x-%j.log"
    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    doctor: bool = False

    def problems(self) -> list[str]:
        """Every problem of the options."""
        found = []
        if self.time is not None and not _TIME.fullmatch(self.time):
            found.append(f"--time {escape_controls(self.time)}: expected minutes, H:MM:SS or D-HH:MM:SS.")
        counts = [("--chain", self.chain), ("--cpus-per-task", self.cpus_per_task)]
        found += [f"{name} {value}: expected 1 or more." for name, value in counts if value is not None and value < 1]
        for name in ("partition", "account", "qos", "exclude", "output"):
            value = getattr(self, name)
            if value == "":
                found.append(f"--{name}: expected a name.")
            found += line_problems(f"--{name}", value or "")
        for name in ("sbatch", "srun"):
            found += slurm.option_problems(name, getattr(self, name))
        found += [problem for text in self.setup for problem in line_problems("--setup", text)]
        return found


@dataclass(frozen=True)
class BatchScript:
    """A batch script.

    Attributes:
        text: the script.
        run_dir: folder of its run.
        folders: folders of its output, which Slurm does not make.
    """

    text: str
    run_dir: Path
    folders: tuple[Path, ...] = ()


def batch_script(request: RunRequest, options: SlurmOptions, folder: Path) -> BatchScript:
    """Write the batch script of a run.

    Args:
        request: the run.
        options: options of Slurm.
        folder: working folder of the job, from which relative paths count.

    Raises:
        LaunchError: an option is wrong; every problem of options and recipe is listed.
        RecipeError: only the recipe is wrong; every problem is listed.
    """
    found: list[Path] = []

    def check(recipe: Recipe) -> list[str]:
        streams = [slurm.output_option(folder, options.output), *options.sbatch]
        folders, problems = slurm.output_folders(streams, request.name or recipe.run.name, folder)
        found.extend(folders)
        return problems

    run = request.prepare([*options.problems(), *line_problems("the working folder", str(folder))], check)
    if not _reserves_accelerators(run, options):
        _logger.warning(
            "warning: the job asks Slurm for no accelerators, and without any it trains on the CPUs. Add --instance "
            "NAME (`hlat hardware list`) or --sbatch=--gpus-per-node=%d, or say run.device=cpu; nothing is missing on "
            "a cluster whose nodes give theirs to every job.",
            run.nproc,
        )
    return BatchScript(_script(run, options, folder), folder / run.recipe.run_dir, tuple(found))


def _reserves_accelerators(run: PreparedRun, options: SlurmOptions) -> bool:
    """Return True if the job reserves accelerators, or needs none: the device is the CPU, or the instance has none."""
    device = run.recipe.run.device
    wants = device == "auto" or expects_accelerator(device)  # of auto, this machine may know nothing: a login node
    if not wants or run.request.instance is not None:
        return True
    return slurm.asks_for_accelerators(options.sbatch)


def _script(run: PreparedRun, options: SlurmOptions, folder: Path) -> str:
    program = run.program or [sys.executable, "-P", "-m", "hlat"]
    common = [run.request.recipe, *run.request.overrides, "--nproc", str(run.nproc)]
    words = shlex.join([*program, "train", *common])
    if run.request.nodes > 1:
        words += ' --nodes "$nodes"' if run.request.least is None else f' --nodes "{run.request.least}:$nodes"'
    keep = ["--no-kill"] if run.request.least is not None else []
    step = ["srun", "--ntasks-per-node=1", *keep, "--kill-on-bad-exit=0", f"--wait={run.request.grace}", *options.srun]
    least, is_chain = run.request.least or run.request.nodes, options.chain is not None
    exports = [f"export {name}={shlex.quote(value)}" for name, value in run.environment.items()]
    return "\n".join(
        [
            "#!/bin/bash",
            *(slurm.directive(option) for option in _options(run, options, folder)),
            f"# Written by hlat {version('hlat')}. It ends with the exit code of the run (docs/clusters.md).",
            "",
            *options.setup,
            *exports,
            'cores="${SLURM_CPUS_ON_NODE:-1}"  # of this job on a node; the command of a node has all of them',
            f"threads=$(( cores / {run.nproc} ))  # of a process",
            'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(( threads > 0 ? threads : 1 ))}"',
            _PREPARE,
            'nodes="$SLURM_JOB_NUM_NODES" exclude=()',
            'echo "job $SLURM_JOB_ID, start $(( ${SLURM_RESTART_COUNT:-0} + 1 )), nodes $SLURM_JOB_NODELIST"',
            *([preflight_step(step, program, common, least, is_chain)] if options.doctor else []),
            f'{shlex.join(step)} --nodes="$nodes" --ntasks="$nodes" --cpus-per-task="$cores" "${{exclude[@]}}" \\',
            f"  {words}",
            "code=$?",
            (_CHAIN if options.chain is not None else _REQUEUE).strip(),
            'exit "$code"',
            "",
        ]
    )


def _options(run: PreparedRun, options: SlurmOptions, folder: Path) -> list[str]:
    """Options of sbatch for the run."""
    given = {
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "exclude": options.exclude,
        "cpus-per-task": options.cpus_per_task,
    }
    queue = ["--requeue"] if options.chain is None else [f"--array=1-{options.chain}%1", "--no-requeue"]
    return [
        f"--job-name={run.name}",
        f"--nodes={run.request.nodes}",
        f"--ntasks-per-node={run.nproc}",  # cores for so many processes; one task is started
        f"--chdir={folder}",
        slurm.output_option(folder, options.output),
        "--open-mode=append",  # the output of earlier starts is kept
        f"--signal=USR1@{run.request.grace}",  # to every process; with B: it would reach the script only
        *queue,
        *([] if run.request.least is None else ["--no-kill"]),
        *(f"--{name}={value}" for name, value in given.items() if value is not None),
        *run.settings.slurm,
        *options.sbatch,
    ]
