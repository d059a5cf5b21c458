"""A complete Slurm cluster on this machine, private to a folder: munged, slurmctld, and a slurmd per simulated machine.

with cluster(folder, machines=2) as environment:
    subprocess.run(["srun", "-N2", ...], env=environment)
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.launch.ports import free_port

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue")
_SETTINGS = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
KillOnBadExit=1
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=10
ReturnToService=2
SlurmdTimeout=30
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_BOUND = 30.0  # seconds until a wait fails


def missing() -> str:
    """Explain why a cluster cannot be started here; empty if it can."""
    gone = [program for program in _PROGRAMS if shutil.which(program) is None]
    if gone:
        return f"{', '.join(gone)} not installed: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


@contextmanager
def cluster(folder: Path, machines: int) -> Iterator[dict[str, str]]:
    """Start a cluster; yield the environment for its commands. All daemons are ended by pid at the end."""
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(parents=True)
    host, cores = socket.gethostname().partition(".")[0], os.cpu_count()
    ports = [free_port() for _ in range(machines + 1)]
    nodes = "\n".join(
        f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1 + i]} CPUs={cores} RealMemory=1000"
        for i in range(machines)
    )
    (folder / "slurm.conf").write_text(_SETTINGS.format(host=host, folder=folder, ports=ports, nodes=nodes))
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
    key = folder / "munge/key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment["SLURM_CONF"] = str(folder / "slurm.conf")
    munge = [f"--{name.replace('_', '-')}={folder}/munge/{name}" for name in ("socket", "key_file", "pid_file")]
    munge = [word.replace("/key_file", "/key").replace("/pid_file", "/pid") for word in munge]
    own = [f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed"]
    try:
        subprocess.run(["munged", "--force", *munge, *own], env=environment, check=True, capture_output=True)
        subprocess.run(["slurmctld"], env=environment, check=True, capture_output=True)
        for i in range(machines):
            subprocess.run(["slurmd", "-N", f"n{i}"], env=environment, check=True, capture_output=True)
        _wait_for_machines(environment, machines)
        yield environment
    finally:
        for file in [*folder.glob("slurmd-*.pid"), folder / "slurmctld.pid", folder / "munge/pid"]:
            _end(file)


def job_fields(environment: dict[str, str], job: int | str) -> dict[str, str]:
    """Fields of a job, or of an element ARRAY_ELEMENT, that ``scontrol`` prints; values must not contain spaces."""
    command = ["scontrol", "show", "job", str(job), "-o"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)


def wait_for_state(environment: dict[str, str], job: int | str, *states: str, bound: float = _BOUND) -> dict[str, str]:
    """Wait until a job is in one of these states; return its fields."""
    deadline = time.monotonic() + bound
    while (fields := job_fields(environment, job))["JobState"] not in states:
        assert time.monotonic() < deadline, f"job {job} is {fields['JobState']} after {bound:g} s"
        time.sleep(0.2)
    return fields


def start_now(environment: dict[str, str], job: int | str) -> None:
    """Start a job that was queued again; Slurm waits two minutes otherwise."""
    wait_for_state(environment, job, "PENDING")
    time.sleep(2)  # slurmd compares whole seconds: it takes a start in the second of the requeue for the ended one
    deadline = time.monotonic() + 2 * _BOUND
    command = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
    while job_fields(environment, job)["JobState"] == "PENDING":  # Slurm sets its own time after the job has completed
        assert time.monotonic() < deadline, f"job {job} does not start"
        subprocess.run(command, env=environment, capture_output=True, check=False)
        time.sleep(0.5)


def kill_machine(environment: dict[str, str], name: str) -> None:
    """Kill a machine's daemon and every process of its jobs, as a loss of power does."""
    daemon = int((Path(environment["SLURM_CONF"]).parent / f"slurmd-{name}.pid").read_text())
    killed = [psutil.Process(daemon)]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            own = process.environ()
            if own.get("SLURMD_NODENAME") == name and own.get("SLURM_CONF") == environment["SLURM_CONF"]:
                killed += [process, *(one for one in process.parents() if "slurmstepd" in " ".join(one.cmdline()))]
    for process in killed:
        with suppress(psutil.Error):
            process.kill()


def start_machine(environment: dict[str, str], name: str) -> None:
    """Start a machine that was killed."""
    subprocess.run(["slurmd", "-N", name], env=environment, check=True, capture_output=True)


def _wait_for_machines(environment: dict[str, str], machines: int) -> None:
    deadline = time.monotonic() + _BOUND
    command = ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]
    while len(subprocess.run(command, env=environment, capture_output=True, check=False).stdout.split()) < machines:
        assert time.monotonic() < deadline, "the machines are not idle after half a minute"
        time.sleep(0.1)


def _end(file: Path) -> None:
    if not file.exists():
        return
    pid = int(file.read_text())
    deadline = time.monotonic() + _BOUND
    try:
        os.kill(pid, 15)
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.05)
        os.kill(pid, 9)
    except ProcessLookupError:
        pass
