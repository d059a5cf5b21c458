"""Slurm: the batch script of a run, and its jobs.

    RunRequest, SlurmOptions --batch_script--> script --submit_script--> job id --> RUN/slurm-jobs.jsonl
    RUN/slurm-jobs.jsonl --newest line--> job_state (scontrol), job_log (end of its output), cancel_job (scancel)

    the script: [srun hlat doctor] --> srun `hlat train` on each node --highest exit code--> the script
        75 (saved)   one job: the script queues its job again      a chain: the next job of the array goes on
        0, 2, 4      the end: the rest of a chain is cancelled     (finished, mistake of the user, diverged)
        others       the end of this job                           a chain: the next job of the array tries again
    a bad node that the doctor names: left out, if the others are enough (--nodes MIN:MAX); else drained where the user
        may, and this job queued again; else a new job that excludes it

The supervisors of the nodes restart the run within the job, whichever node is lost (docs/hosts.md). A node that Slurm
sets down ends the job, which is queued again, unless the run may go on with fewer nodes: then the job keeps the others.

A chain is a job array of which one element runs at a time. It needs one submission, has one id to watch and to cancel,
and is one script that can be printed; jobs with dependencies (``afterany``) need the id of each one before.
"""

import json
import logging
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from hlat.config import Recipe
from hlat.launch.local_processes import hlat_command
from hlat.launch.run_request import PreparedRun, RunRequest, ask_scheduler, small_counts
from hlat.runtime import slurm
from hlat.runtime.backend.table import expects_accelerator
from hlat.runtime.errors import LaunchError, StorageError
from hlat.runtime.process import REQUEUE_CODE
from hlat.runtime.terminal import escape_controls, line_problems

_logger = logging.getLogger(__name__)
_TIME_LIMIT = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+|\d+-\d+:\d\d|\d+-\d+:\d\d:\d\d")  # man sbatch, --time
_OWN_OPTIONS = {
    "--nodes": "--nodes",
    "--ntasks": "--nproc",
    "--ntasks-per-node": "--nproc",
    "--job-name": "--name",
    "--array": "--chain",
    "--signal": "--grace",
    "--chdir": "the command in that folder",
}
"""Options of sbatch with which other lines of the script would not agree, and what to give instead."""

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
        cpus_per_task: CPU cores of each process; None for one.
        output: file for the output of the script; Slurm replaces %j, %x and others.
        sbatch: further options of sbatch, such as ``--reservation=x`` or ``reservation=x``.
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
        found = []
        if self.time is not None and not _TIME_LIMIT.fullmatch(self.time):
            found.append(f"--time {escape_controls(self.time)}: expected minutes, H:MM:SS or D-HH:MM:SS.")
        found += small_counts({"--chain": self.chain, "--cpus-per-task": self.cpus_per_task})
        for name, value in [*self.named().items(), ("to", self.output)]:
            if value == "":
                found.append(f"--{name}: expected a name.")
            found += line_problems(f"--{name}", value or "")
        sbatch = [slurm.long_option(text) for text in self.sbatch]
        found += slurm.option_problems("--set", "sbatch", sbatch)
        owned = {text: _OWN_OPTIONS.get(text.partition("=")[0]) for text in sbatch}
        found += [f"--set {escape_controls(text)}: give {own}, which sets it." for text, own in owned.items() if own]
        found += slurm.option_problems("--srun", "srun", self.srun)
        found += [problem for text in self.setup for problem in line_problems("--setup", text)]
        return found

    def named(self) -> dict[str, str | None]:
        """Options that sbatch has under the same name."""
        return {name: getattr(self, name) for name in ("partition", "account", "qos", "exclude")}


@dataclass(frozen=True)
class SlurmSubmission:
    """A run that was given to Slurm.

    Attributes:
        script: the batch script.
        job: id of the job; None if nothing was submitted.
        run_dir: folder of the run.
        missing: folders of the output that are missing, which Slurm does not make; submission makes them.
    """

    script: str
    job: int | None
    run_dir: Path
    missing: tuple[Path, ...] = ()


def batch_script(request: RunRequest, options: SlurmOptions, folder: Path) -> SlurmSubmission:
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
        streams = [slurm.output_option(folder, options.output), *map(slurm.long_option, options.sbatch)]
        folders, problems = slurm.output_folders(streams, request.name or recipe.run.name, folder)
        found.extend(folders)
        return problems

    run = request.prepare([*options.problems(), *line_problems("the working folder", str(folder))], check)
    # A login node, where this is asked, knows nothing of the devices that ``auto`` finds on a compute node.
    wants = run.recipe.run.device == "auto" or expects_accelerator(run.recipe.run.device)
    reserves = slurm.asks_for_accelerators([slurm.long_option(text) for text in options.sbatch])
    if wants and request.instance is None and not reserves:
        _logger.warning(
            "warning: the job asks Slurm for no accelerators, and without any it trains on the CPUs. Add --instance "
            "NAME (`hlat hardware list`) or --set gpus-per-node=%d, or say run.device=cpu; nothing is missing on "
            "a cluster whose nodes give theirs to every job.",
            run.nproc,
        )
    missing = tuple(each for each in found if not each.is_dir())
    return SlurmSubmission(_script_text(run, options, folder), None, folder / run.recipe.run_dir, missing)


def _script_text(run: PreparedRun, options: SlurmOptions, folder: Path) -> str:
    program = run.program or hlat_command([])
    common = [run.request.recipe, *run.request.overrides, "--nproc", str(run.nproc)]
    words = shlex.join([*program, "train", *common])
    if run.request.nodes > 1:
        words += ' --nodes "$nodes"' if run.request.least is None else f' --nodes "{run.request.least}:$nodes"'
    keep = ["--no-kill"] if run.request.least is not None else []
    # kill-on-bad-exit=0: a node that fails does not end the others, whose supervisors restart the run.
    step = ["srun", "--ntasks-per-node=1", *keep, "--kill-on-bad-exit=0", f"--wait={run.request.grace}", *options.srun]
    least, is_chain = run.request.least or run.request.nodes, options.chain is not None
    record = folder / run.recipe.run_dir / _RECORD
    exports = [f"export {name}={shlex.quote(value)}" for name, value in run.environment.items()]
    return "\n".join(
        [
            "#!/bin/bash",
            *(slurm.directive(option) for option in _sbatch_options(run, options, folder)),
            f"# Written by hlat {version('hlat')}. It ends with the exit code of the run (docs/clusters.md).",
            "",
            *options.setup,
            *exports,
            "ulimit -S -l hard  # of memory that InfiniBand registers; the shell that submitted may have had less",
            'cores="${SLURM_CPUS_ON_NODE:-1}"  # of this job on a node; the command of a node has all of them',
            f"threads=$(( cores / {run.nproc} ))  # of a process",
            'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(( threads > 0 ? threads : 1 ))}"',
            _PREPARE,
            'nodes="$SLURM_JOB_NUM_NODES" exclude=()',
            'echo "job $SLURM_JOB_ID, start $(( ${SLURM_RESTART_COUNT:-0} + 1 )), nodes $SLURM_JOB_NODELIST"',
            *([preflight_step(step, program, common, least, is_chain, record)] if options.doctor else []),
            f'{shlex.join(step)} --nodes="$nodes" --ntasks="$nodes" --cpus-per-task="$cores" "${{exclude[@]}}" \\',
            f"  {words}",
            "code=$?",
            (_CHAIN if options.chain is not None else _REQUEUE).strip(),
            'exit "$code"',
            "",
        ]
    )


def _sbatch_options(run: PreparedRun, options: SlurmOptions, folder: Path) -> list[str]:
    given = {"time": options.time, **options.named()}
    further = [*run.settings.slurm, *map(slurm.long_option, options.sbatch)]
    queue = ["--requeue"] if options.chain is None else [f"--array=1-{options.chain}%1", "--no-requeue"]
    return [
        f"--job-name={run.name}",
        f"--nodes={run.request.nodes}",
        "--ntasks-per-node=1",  # the supervisor of a node, which starts its processes
        f"--cpus-per-task={run.nproc * (options.cpus_per_task or 1)}",
        f"--chdir={folder}",
        slurm.output_option(folder, options.output),
        "--open-mode=append",  # the output of earlier starts is kept
        f"--signal=USR1@{run.request.grace}",  # to every process; with B: it would reach the script only
        *queue,
        *([] if run.request.least is None else ["--no-kill"]),
        *(f"--{name}={value}" for name, value in given.items() if value is not None),
        *slurm.memory_options(further),
        *further,
    ]


_PREFLIGHT_STEP = r"""
# The nodes are examined first. A bad one is named, and left out or replaced.
bad_file="$PWD/hlat-bad-nodes-$SLURM_JOB_ID"
{doctor} --exclude-bad "$bad_file"
examined=$?
bad=$(tr '\n' ' ' <"$bad_file" 2>/dev/null) && rm -f "$bad_file"
if [ "$examined" -ne 0 ] && [ -z "$bad" ]; then
  exit "$examined"  # no node is to blame: the doctor has said what is
fi
if [ -n "$bad" ]; then
  count=$(wc -w <<<"$bad")
  echo "bad nodes: $bad" >&2
  if [ "$((SLURM_JOB_NUM_NODES - count))" -ge {least} ]; then
    exclude=(--exclude="$(tr -s ' ' ',' <<<"${{bad% }}")")
    nodes=$((SLURM_JOB_NUM_NODES - count))
  elif scontrol update NodeName="$(tr -s ' ' ',' <<<"${{bad% }}")" State=DRAIN Reason="hlat doctor" 2>/dev/null; then
    echo "drained them, and queueing this job again for other nodes" >&2
    {again}
  else
    echo "this user may not drain nodes: submitting this job again without them" >&2
    {cancel_rest}excluded=$(scontrol show job "$SLURM_JOB_ID" -o | sed -n 's/.* ExcNodeList=\([^ (][^ ]*\).*/\1,/p')
    job=$(sbatch --parsable --exclude="$excluded$(tr -s ' ' ',' <<<"${{bad% }}")" "$0") || exit 1
    echo "{{\"job\": ${{job%%;*}}}}" >>{record}  # `hlat launch status` shows the newest
    exit 0
  fi
fi"""


def preflight_step(
    step: Sequence[str], program: Sequence[str], words: Sequence[str], least: int, is_chain: bool, record: Path
) -> str:
    """Write the lines that run the doctor first; ``least`` nodes suffice, a chain's next job tries again."""
    tasks = ' --ntasks="$nodes" --cpus-per-task="$cores"'
    doctor = shlex.join(step) + tasks + " \\\n  " + shlex.join([*program, "doctor", *words])
    again = "exit 75" if is_chain else 'scontrol requeue "$SLURM_JOB_ID"\n    exit 75'
    cancel_rest = 'scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"\n    ' if is_chain else ""
    parts = {"doctor": doctor, "again": again, "cancel_rest": cancel_rest, "record": shlex.quote(str(record))}
    return _PREFLIGHT_STEP.format(least=least, **parts)


_RECORD = "slurm-jobs.jsonl"
_SLURM_TIMEOUT = 60.0  # seconds to wait for Slurm's controller
_LAST_BYTES = 1 << 16  # of an output file
_UNDIVIDED = "4294967294"  # element of what is left of an array that was cancelled before it was divided
_JOB_FIELDS = {"state": "JobState", "reason": "Reason", "exit_code": "ExitCode", "nodes": "NodeList", "end": "EndTime"}


@dataclass(frozen=True)
class JobState:
    """State of a job, as Slurm reports it."""

    job: str  # its id; of a chain's element, ARRAY_ELEMENT
    state: str  # state, such as PENDING, RUNNING or COMPLETED
    reason: str  # of that state
    restarts: int  # times that Slurm has started it again
    exit_code: str  # exit code and signal, CODE:SIGNAL
    nodes: str  # in Slurm's notation
    end: str  # time at which it ends or has ended
    output: Path


def submit_script(prepared: SlurmSubmission) -> SlurmSubmission:
    """Submit a batch script, record job and script in the run's folder, and return it with the id of the job.

    Raises:
        LaunchError: Slurm is not installed here, or refuses the job.
        StorageError: the run's folder cannot be written; nothing is submitted then.
    """
    record = prepared.run_dir / _RECORD
    try:
        for folder in (prepared.run_dir, *prepared.missing):
            folder.mkdir(parents=True, exist_ok=True)
        # Opened first: a job that cannot be recorded is not submitted.
        with record.open("a", encoding="utf-8") as file:
            printed = _ask_slurm(["sbatch", "--parsable"], prepared.script)
            job = int(printed.partition(";")[0])  # a cluster's name may follow
            file.write(json.dumps({"job": job, "time": time.time(), "script": prepared.script}) + "\n")
    except OSError as error:
        raise StorageError(f"{error.filename or record} cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise LaunchError(f"sbatch printed no job id: {error}") from error
    return replace(prepared, job=job)


def newest_job(run_dir: Path) -> int:
    """Id of the newest job that was submitted for a run's folder; LaunchError if there is none."""
    record = run_dir / _RECORD
    try:
        lines = record.read_text(encoding="utf-8").splitlines()
        if not lines:
            reason = f"the record of jobs ({_RECORD}) is empty: sbatch has accepted none, or was interrupted."
            raise LaunchError(f"{run_dir}: {reason} `hlat launch slurm` submits one; `squeue --me` lists your jobs.")
        return int(json.loads(lines[-1])["job"])
    except OSError as error:
        raise LaunchError(f"{run_dir}{_no_record(run_dir, error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        reason = f"the record of jobs ({_RECORD}) is damaged in its last line, which holds no job."
        raise LaunchError(f"{run_dir}: {reason} Remove that line, or ask Slurm itself: `squeue --me`.") from error


def _no_record(run_dir: Path, error: OSError) -> str:
    """Say why the record of jobs of a folder cannot be read, and what would work; follows the name of the folder."""
    folder = "Give the folder of the run: run.dir, or runs/ and run.name."
    if isinstance(error, PermissionError):
        return ": permission denied. Ask for the permission to read it, or give the folder of another run."
    try:
        if run_dir.is_file():
            return f" is a file. {folder}"
        if not run_dir.exists():
            return f": there is no such folder (looked in {Path.cwd()}). {folder}"
    except OSError as other:  # a name that no file can have
        error = other
    if isinstance(error, FileNotFoundError):
        return f": no job of Slurm was submitted for this folder. `hlat launch slurm` submits one. {folder}"
    return f": the record of jobs ({_RECORD}) cannot be read: {error.strerror or error}. {folder}"


def job_state(run_dir: Path) -> list[JobState]:
    """Ask Slurm for a run's newest job, a chain per element or range; LaunchError if it is unknown."""
    lines = _ask_slurm(["scontrol", "show", "job", str(newest_job(run_dir)), "-o"]).splitlines()
    return [_parse_job(line) for line in lines if line.strip()]


def job_log(run_dir: Path, lines: int = 50) -> str:
    """Return the last lines of the output of a run's newest job; of a chain, of the element that began last.

    Raises:
        LaunchError: nothing was submitted for the run, Slurm does not know the job any more, or there is no output yet.
    """
    files = [found.output for found in job_state(run_dir) if found.output.is_file()]
    if not files:
        raise LaunchError(f"job {newest_job(run_dir)} has written no output yet; see `hlat launch status {run_dir}`.")
    newest = max(files, key=lambda file: file.stat().st_mtime)
    with newest.open("rb") as file:
        file.seek(max(0, newest.stat().st_size - _LAST_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])


def cancel_job(run_dir: Path) -> int:
    """Cancel a run's newest job, which has KillWait (30 s by default) to save; its id, or LaunchError if refused."""
    job = newest_job(run_dir)
    _ask_slurm(["scancel", str(job)])
    return job


def _parse_job(line: str) -> JobState:
    """Parse a line of ``scontrol show job -o``."""
    values = {name: _job_field(line, key) for name, key in _JOB_FIELDS.items()}
    job, element = _job_field(line, "ArrayJobId"), _job_field(line, "ArrayTaskId")
    return JobState(
        job=f"{job}_{element}" if element and element != _UNDIVIDED else job or _job_field(line, "JobId"),
        restarts=int(_job_field(line, "Restarts") or 0),
        output=Path(_job_output(line)),
        **values,
    )


def _job_field(line: str, key: str) -> str:
    found = re.search(rf"(?:^| ){key}=(\S*)", line)
    return found[1] if found else ""


def _job_output(line: str) -> str:
    found = re.search(r" StdOut=(.*?)(?: [A-Z]\w*=|\s*$)", line)  # the name may have spaces: the next field ends it
    return found[1] if found else ""


def _ask_slurm(command: Sequence[str], text: str | None = None) -> str:
    missing = f"{command[0]} is not installed here: run this on a machine of the Slurm cluster."
    return ask_scheduler(command, text, _SLURM_TIMEOUT, missing)
