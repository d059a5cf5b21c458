"""Jobs of a run in Slurm: submit the script, and ask about the newest job of a run's folder.

script --sbatch--> job id --> RUN/slurm-jobs.jsonl (one line per submission)
RUN/slurm-jobs.jsonl --newest line--> scontrol show job, scancel, the end of the job's output
"""

import json
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hlat.launch.submission.slurm_script import BatchScript
from hlat.runtime.errors import LaunchError, StorageError

_RECORD = "slurm-jobs.jsonl"
_TIMEOUT = 60.0  # seconds to wait for Slurm's controller
_LAST_BYTES = 1 << 16  # of an output file
_UNDIVIDED = "4294967294"  # element of what is left of an array that was cancelled before it was divided
_FIELDS = {"state": "JobState", "reason": "Reason", "exit_code": "ExitCode", "nodes": "NodeList", "end": "EndTime"}


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


@dataclass(frozen=True)
class JobState:
    """State of a job, as Slurm reports it.

    Attributes:
        job: its id; of a chain's element, ARRAY_ELEMENT.
        state: state, such as PENDING, RUNNING or COMPLETED.
        reason: reason of that state.
        restarts: number of times that Slurm has started it again.
        exit_code: exit code and signal, CODE:SIGNAL.
        nodes: nodes, in Slurm's notation.
        end: time at which it ends or has ended.
        output: file with its output.
    """

    job: str
    state: str
    reason: str
    restarts: int
    exit_code: str
    nodes: str
    end: str
    output: Path


def submit_script(script: BatchScript) -> int:
    """Submit a batch script, and record job and script in the run's folder.

    Returns:
        The id of the job.

    Raises:
        LaunchError: Slurm is not installed here, or refuses the job.
        StorageError: the run's folder cannot be written; nothing is submitted then.
    """
    record = script.run_dir / _RECORD
    try:
        for folder in (script.run_dir, *script.folders):
            folder.mkdir(parents=True, exist_ok=True)
        with record.open("a", encoding="utf-8") as file:
            printed = _slurm(["sbatch", "--parsable"], script.text)
            job = int(printed.partition(";")[0])  # a cluster's name may follow
            file.write(json.dumps({"job": job, "time": time.time(), "script": script.text}) + "\n")
    except OSError as error:
        raise StorageError(f"{error.filename or record} cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise LaunchError(f"sbatch printed no job id: {error}") from error
    return job


def newest_job(run_dir: Path) -> int:
    """Id of the newest job that was submitted for a run's folder.

    Raises:
        LaunchError: there is none.
    """
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
    """Ask Slurm for the newest job of a run; a chain has one entry per element or range of them.

    Raises:
        LaunchError: nothing was submitted for the run, or Slurm does not know the job any more.
    """
    lines = _slurm(["scontrol", "show", "job", str(newest_job(run_dir)), "-o"]).splitlines()
    return [_parse(line) for line in lines if line.strip()]


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
    """Cancel the newest job of a run; a run that trains saves and stops. Return the id of the job.

    The processes have as long to save as the cluster's KillWait says (30 s by default).

    Raises:
        LaunchError: nothing was submitted for the run, or Slurm refuses.
    """
    job = newest_job(run_dir)
    _slurm(["scancel", str(job)])
    return job


def _parse(line: str) -> JobState:
    """Parse a line of ``scontrol show job -o``."""
    values = {name: _field(line, key) for name, key in _FIELDS.items()}
    job, element = _field(line, "ArrayJobId"), _field(line, "ArrayTaskId")
    return JobState(
        job=f"{job}_{element}" if element and element != _UNDIVIDED else job or _field(line, "JobId"),
        restarts=int(_field(line, "Restarts") or 0),
        output=Path(_output(line)),
        **values,
    )


def _field(line: str, key: str) -> str:
    found = re.search(rf"(?:^| ){key}=(\S*)", line)
    return found[1] if found else ""


def _output(line: str) -> str:
    """Output file of a job: its name may contain spaces, and the next field follows it."""
    found = re.search(r" StdOut=(.*?)(?: [A-Z]\w*=|\s*$)", line)
    return found[1] if found else ""


def _slurm(command: Sequence[str], text: str | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
    except FileNotFoundError as error:
        raise LaunchError(f"{command[0]} is not installed here: run this on a machine of the Slurm cluster.") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{command[0]} has not answered for {_TIMEOUT:g} s.") from error
    if done.returncode:
        raise LaunchError(f"{command[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
