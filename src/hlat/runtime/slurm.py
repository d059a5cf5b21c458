"""A job of Slurm: the places of its tasks in a run, and the time at which it ends.

    SLURM_PROCID, SLURM_NTASKS, ... of a task of a step --variables--> RANK, WORLD_SIZE, ... as torchrun would set them
    SLURM_JOB_END_TIME, or what squeue says --end_of_job--> seconds since 1970

``srun hlat train`` starts a process per task, and tells each which one it is. Without a look at that each would be a
run of its own. The batch script and the shell of salloc are no tasks: they are told to use srun where the job has
several.
"""

import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping
from datetime import datetime

from hlat.runtime.errors import LaunchError

Ask = Callable[[list[str]], str]
"""Runs a command and gives what it prints; an empty text where it cannot."""

_PATIENCE = 10.0  # seconds for an answer of Slurm's controller
_NO_TASKS = 0xFFFFFFF0  # steps with a higher number are the batch script, an interactive shell, ...
_PORTS = range(20000, 30000)  # below those that systems give out by themselves
_REMEDY = (
    "Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each process yourself, or WORLD_SIZE=1 in one "
    "that is to be a run of its own."
)


def rank_variables(environment: Mapping[str, str] = os.environ, ask: Ask | None = None) -> dict[str, str]:
    """What says which process of a run this one is, where Slurm has started several tasks and nobody has said it.

    A step of one task is one process. MASTER_ADDR and MASTER_PORT stay what they are where they are set.

    Returns:
        Variables to be added to the environment; none outside Slurm, in a step of one task, in the script or shell of a
        job of one task, or where WORLD_SIZE is set.

    Raises:
        LaunchError: this is the script or the shell of a job of several tasks, or its variables do not say enough.
    """
    if not environment.get("SLURM_JOB_ID") or environment.get("WORLD_SIZE"):
        return {}
    if not in_step(environment):
        _refuse_several(environment)
        return {}
    if task_count(environment) == 1:
        return {}
    return _of_task(environment, ask or _asked)


def in_step(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a task that srun started."""
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    return step.isdecimal() and int(step) < _NO_TASKS and "SLURM_PROCID" in environment


def task_count(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many tasks this one's step has; None where it does not say."""
    return _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def job_end_time(environment: Mapping[str, str] = os.environ, ask: Ask | None = None) -> float | None:
    """When the job ends, seconds since 1970; None outside Slurm, without a limit of time, or where Slurm is silent.

    Slurm is asked where it has not said so by itself (older versions do not), by rank 0 only: its controller serves a
    whole cluster.
    """
    try:
        return float(environment["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        pass
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdecimal() or environment.get("RANK", "0") != "0":
        return None
    ask = ask or _asked
    written = ask(["squeue", "-h", "-j", job, "-o", "%e"]).strip()
    if not written:
        found = re.search(r"\bEndTime=(\S+)", ask(["scontrol", "show", "job", job]))
        written = found[1] if found else ""
    try:
        return datetime.fromisoformat(written).timestamp()  # in the time of this machine, as Slurm writes it
    except ValueError:  # N/A, Unknown: there is no limit
        return None


def first_host(nodes: str) -> str:
    """The first of a list of hosts as Slurm writes it: ``gpu-[007-009,12],login`` begins with gpu-007."""
    depth, first = 0, nodes
    for at, character in enumerate(nodes):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            first = nodes[:at]
            break
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def _refuse_several(environment: Mapping[str, str]) -> None:
    many = _number(environment, "SLURM_NTASKS") or 1
    machines = _number(environment, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    if many > 1 or machines > 1:
        count = f"{many} tasks" if many > 1 else f"{machines} machines"
        raise LaunchError(
            f"this is the script or the shell of Slurm job {environment['SLURM_JOB_ID']}, which has {count}: only "
            "`srun hlat train RECIPE` starts a process in each. To train here alone, say in how many processes: "
            "`hlat train RECIPE --nproc 1`."
        )


def _of_task(environment: Mapping[str, str], ask: Ask) -> dict[str, str]:
    problems: list[str] = []
    if (_number(environment, "SLURM_HET_SIZE") or 1) > 1:
        problems.append("it is a heterogeneous job, whose parts number their tasks each for itself")
    values = {
        "RANK": _needed(environment, problems, "SLURM_PROCID"),
        "WORLD_SIZE": _needed(environment, problems, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "LOCAL_RANK": _needed(environment, problems, "SLURM_LOCALID"),
        "GROUP_RANK": _needed(environment, problems, "SLURM_NODEID"),
    }
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    address = environment.get("MASTER_ADDR") or (_address(first_host(nodes), ask) if nodes else "")
    if not address:
        problems.append("neither SLURM_STEP_NODELIST, SLURM_JOB_NODELIST nor MASTER_ADDR is set")
    job, step = environment["SLURM_JOB_ID"], _number(environment, "SLURM_STEP_ID", "SLURM_STEPID")
    if not job.isdecimal():
        problems.append(f"SLURM_JOB_ID={job} is no number")
    if problems:
        what = "; ".join(problems)
        raise LaunchError(f"Slurm does not say which process of the run this task is: {what}. {_REMEDY}")
    port = _PORTS[(31 * int(job) + (step or 0)) % len(_PORTS)]
    own = {"MASTER_ADDR": address, "MASTER_PORT": environment.get("MASTER_PORT") or port}
    return {name: str(value) for name, value in {**values, **own}.items()}


def _needed(environment: Mapping[str, str], problems: list[str], *names: str) -> int | None:
    found = _number(environment, *names)
    if found is None:
        problems.append(f"{' or '.join(names)} is not set to a number")
    return found


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is a number."""
    found = (environment.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdecimal()), None)


def _address(host: str, ask: Ask) -> str:
    """The name of a host, or its address where the name means nothing outside Slurm."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        found = re.search(r"\bNodeAddr=(\S+)", ask(["scontrol", "show", "node", host, "-o"]))
        return found[1] if found else host
    return host


def _asked(command: list[str]) -> str:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=True,
            env={**os.environ, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"},
        ).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
