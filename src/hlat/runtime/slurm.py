"""Slurm jobs: ranks of their tasks, and the time at which a job ends.

    SLURM_PROCID, SLURM_NTASKS, ... of a task --rank_variables--> RANK, WORLD_SIZE, ... as torchrun would set them
    SLURM_JOB_END_TIME, or the output of squeue --job_end_time--> seconds since 1970
    options of sbatch, as a user gives them ----directive-------> lines of a batch script

``srun hlat train`` starts one process per task and numbers the tasks. Without these numbers each process would be a
run of its own. The batch script and the shell of salloc are not tasks: in a job of several tasks they get an error that
tells the user to use srun.
"""

import getpass
import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from hlat.runtime.errors import LaunchError
from hlat.runtime.terminal import escape_name, line_problems

Ask = Callable[[list[str]], str]  # runs a command and returns its output; an empty text if the command fails

_TIMEOUT = 10.0  # seconds to wait for Slurm's controller
_NO_TASKS = 0xFFFFFFF0  # higher step numbers: batch script, interactive shell, ...
_PORTS = range(20000, 30000)  # below the ephemeral ports of the system
_ACCELERATORS = re.compile(r"--(gpus|gres|tres-per|exclusive)|-G")  # sbatch: --exclusive takes all of a node, GPUs too
_LONG = re.compile(r"--[a-z][a-z0-9-]*(=|$)")
_MEMORY = re.compile(r"--mem(-per-cpu|-per-gpu)?=")
_SAFE = re.compile(r"[A-Za-z0-9_./:,=@%+\[\]-]+")
_REMEDY = (
    "Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each process yourself, or WORLD_SIZE=1 in one "
    "that is a run of its own."
)


def rank_variables(environment: Mapping[str, str] = os.environ, ask: Ask | None = None) -> dict[str, str]:
    """Return variables that give this Slurm task its rank; none where it is one process, or WORLD_SIZE is set.

    Raises:
        LaunchError: this is the script or shell of a job of several tasks, or Slurm's variables are incomplete.
    """
    if not environment.get("SLURM_JOB_ID") or environment.get("WORLD_SIZE"):
        return {}
    if not in_step(environment):
        _refuse_several(environment)
        return {}
    if task_count(environment) == 1:
        return {}
    return _task_variables(environment, ask or run_command)


def in_step(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if this process is a task that srun started."""
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    return step.isdecimal() and int(step) < _NO_TASKS and "SLURM_PROCID" in environment


def task_count(environment: Mapping[str, str] = os.environ) -> int | None:
    """Number of tasks of this task's step; None if Slurm does not set it."""
    return first_number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def job_end_time(environment: Mapping[str, str] = os.environ, ask: Ask | None = None) -> float | None:
    """End of the job in seconds since 1970; None without a limit, outside Slurm, or if Slurm does not answer."""
    try:
        return float(environment["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        pass
    # Older versions of Slurm. Only rank 0 asks: the controller serves the whole cluster.
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdecimal() or environment.get("RANK", "0") != "0":
        return None
    ask = ask or run_command
    end_time = ask(["squeue", "-h", "-j", job, "-o", "%e"]).strip()
    if not end_time:
        found = re.search(r"\bEndTime=(\S+)", ask(["scontrol", "show", "job", job]))
        end_time = found[1] if found else ""
    try:
        return datetime.fromisoformat(end_time).timestamp()  # Slurm writes the local time of this machine
    except ValueError:  # N/A, Unknown: no time limit
        return None


def first_host(nodes: str) -> str:
    """First host of a list in Slurm's notation: ``gpu-[007-009,12],login`` begins with gpu-007."""
    depth, first = 0, nodes
    for index, character in enumerate(nodes):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            first = nodes[:index]
            break
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def _refuse_several(environment: Mapping[str, str]) -> None:
    processes = first_number(environment, "SLURM_NTASKS") or 1
    machines = first_number(environment, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    if processes > 1 or machines > 1:
        count = f"{processes} tasks" if processes > 1 else f"{machines} machines"
        raise LaunchError(
            f"this is the script or the shell of Slurm job {environment['SLURM_JOB_ID']}, which has {count}: only "
            "`srun hlat train RECIPE` starts a process in each. To train here alone, set the number of processes:  "
            "`hlat train RECIPE --nproc 1`."
        )


def _task_variables(environment: Mapping[str, str], ask: Ask) -> dict[str, str]:
    problems: list[str] = []
    if (first_number(environment, "SLURM_HET_SIZE") or 1) > 1:
        problems.append("it is a heterogeneous job, whose components number their tasks separately")
    values = {
        "RANK": _required(environment, problems, "SLURM_PROCID"),
        "WORLD_SIZE": _required(environment, problems, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "LOCAL_RANK": _required(environment, problems, "SLURM_LOCALID"),
        "GROUP_RANK": _required(environment, problems, "SLURM_NODEID"),
    }
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    address = environment.get("MASTER_ADDR") or (_address(first_host(nodes), ask) if nodes else "")
    if not address:
        problems.append("neither SLURM_STEP_NODELIST, SLURM_JOB_NODELIST nor MASTER_ADDR is set")
    job, step = environment["SLURM_JOB_ID"], first_number(environment, "SLURM_STEP_ID", "SLURM_STEPID")
    if not job.isdecimal():
        problems.append(f"SLURM_JOB_ID={job} is not a number")
    if problems:
        reasons = "; ".join(problems)
        raise LaunchError(f"Slurm does not say which process of the run this task is: {reasons}. {_REMEDY}")
    # Every task computes the same port, and two steps on one machine rarely do.
    port = _PORTS[(31 * int(job) + (step or 0)) % len(_PORTS)]
    own = {"MASTER_ADDR": address, "MASTER_PORT": environment.get("MASTER_PORT") or port}
    tasks = re.fullmatch(r"(\d+)(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local = {} if tasks is None else {"LOCAL_WORLD_SIZE": tasks[1]}  # unless hosts have different numbers
    return {name: str(value) for name, value in {**values, **own, **local}.items()}


def _required(environment: Mapping[str, str], problems: list[str], *names: str) -> int | None:
    found = first_number(environment, *names)
    if found is None:
        problems.append(f"{' or '.join(names)} is not set to a number")
    return found


def long_option(text: str) -> str:
    """Return an option of sbatch or srun, given as NAME=VALUE or --NAME=VALUE, in its long form."""
    return text if text.startswith("-") else f"--{text}"


def option_problems(given_as: str, program: str, options: Sequence[str]) -> list[str]:
    """Return problems of long options for sbatch or srun that a user gives with an option of ours."""
    wrong = [text for text in options if not _LONG.match(text)]
    forms = [
        f"{given_as} {escape_name(text)!r}: expected one option of {program} in the form --comment=text."
        for text in wrong
    ]
    return [*forms, *(problem for text in options for problem in line_problems(given_as, text))]


def memory_options(options: Sequence[str]) -> list[str]:
    """Return sbatch's option for all memory of a node, for a job that takes all of it and says nothing of memory."""
    # Where the administrator has set DefMemPerCPU and the like, a job with --exclusive gets only so much.
    return [] if "--exclusive" not in options or any(map(_MEMORY.match, options)) else ["--mem=0"]


def output_option(folder: Path, output: str) -> str:
    """Return sbatch's option for the output of a job."""
    # Slurm replaces %j and others also in a folder's name.
    is_named = "%" in str(folder) and not Path(output).is_absolute()
    return f"--output={str(folder).replace('%', '%%') + '/' if is_named else ''}{output}"


def output_folders(options: Sequence[str], name: str, folder: Path) -> tuple[list[Path], list[str]]:
    """Return the folders of a job's output, which Slurm does not make, and problems of others."""
    # Without the folder of its output a job fails, and leaves no word anywhere.
    known = {"%%": "%", "%x": name, "%u": _user()}
    folders, problems = [], []
    for option in options:
        stream, _, file = option.partition("=")
        if stream not in ("--output", "--error") or not file:
            continue
        head = f"{stream} {escape_name(file)!r}"
        path = folder / re.sub("%[%xu]", lambda found: known[found[0]], file)
        if "\\" in str(folder / file):  # Slurm 22.05 fails such a job, without a log
            problems.append(f"{head}, in {folder}: Slurm takes no backslash in the name of a file or of its folder.")
        elif re.search(r"(?<!%)(%%)*%[^%xu]", str(Path(file).parent)):
            problems.append(f"{head}: Slurm makes no folders. Write %j and the like in the name of the file only.")
        else:
            folders.append(path.parent)
    return folders, problems


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without this user: Slurm writes the number too
        return str(os.getuid())


def asks_for_accelerators(options: Sequence[str]) -> bool:
    """Return True if options of sbatch reserve accelerators."""
    return any(_ACCELERATORS.match(option) for option in options)


def directive(option: str) -> str:
    """Return the line of a batch script for an option."""
    # Within double quotes sbatch's parser takes backslashes.
    quoted = option if _SAFE.fullmatch(option) else '"' + re.sub(r'(["\\])', r"\\\1", option) + '"'
    return f"#SBATCH {quoted}"


def first_number(environment: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is a number."""
    found = (environment.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdecimal()), None)


def _address(host: str, ask: Ask) -> str:
    try:
        # Slurm's names of nodes may be unknown to the resolver; Slurm then has their addresses.
        socket.getaddrinfo(host, None)
    except OSError:
        found = re.search(r"\bNodeAddr=(\S+)", ask(["scontrol", "show", "node", host, "-o"]))
        return found[1] if found else host
    return host


def run_command(command: list[str]) -> str:
    """Run a command of Slurm and return its output; an empty text if it fails."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=True,
            env={**os.environ, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"},
        ).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
