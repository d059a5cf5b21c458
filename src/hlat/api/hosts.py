"""Runs on several hosts: examined before, started from here, or given to a scheduler.

recipe, options --doctor--> PreflightReport, names of bad hosts in a file
recipe, names of hosts --launch_local--> one ``hlat train`` per host, which meet in the run's folder
recipe, nodes, options --submit_slurm--------> batch script, job
--submit_kubernetes---> manifests
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.api.recipes import Overrides, checks_arguments, optional_text, override_words
from hlat.config import Recipe, load_recipe
from hlat.runtime.errors import LaunchError, StorageError

if TYPE_CHECKING:
    from hlat.launch import KubernetesOptions, PreflightOptions, PreflightReport, SlurmOptions, SlurmSubmission


@checks_arguments
def doctor(
    recipe: Recipe | str | Path | None = None,
    overrides: Overrides = (),
    *,
    options: "PreflightOptions | None" = None,
    hosts: Sequence[str] = (),
    ssh: str = "ssh -o BatchMode=yes",
    exclude_bad: str | Path | None = None,
) -> "PreflightReport":
    """Examine hosts, devices, network and disk before a run (docs/doctor.md).

    Args:
        recipe: recipe of the run; None examines the machines alone.
        overrides: changes of the recipe.
        options: number of hosts and processes, addresses; None examines this host with one process, or the hosts of
            the Slurm step in which every host calls this function.
        hosts: names of hosts on which the command is started; empty for a call on every host, or for this one alone.
        ssh: transport of ``hosts``.
        exclude_bad: file for the names of bad hosts, one per line; written on host 0.

    Returns:
        ``ok``, ``findings`` (each with ``id``, ``name``, ``host``, ``message``, ``remedy``), ``bad_hosts``, ``hosts``,
        ``measured``, and ``to_dict()`` with everything as JSON values. Every host returns the same report.

    Raises:
        LaunchError: an option is wrong, or ``ssh`` cannot be started.
        RecipeError: the recipe has problems.
        StorageError: the file cannot be written.
    """
    from hlat.launch import PreflightOptions, examine_by_ssh, make_request, run_preflight

    options = options or PreflightOptions()
    words = override_words(overrides)
    if hosts:
        # A recipe in memory cannot be sent: each host reads the same file or name.
        if isinstance(recipe, Recipe):
            raise LaunchError("hosts load the recipe themselves: give the path of its file.")
        report = examine_by_ssh(hosts, optional_text(recipe), words, options, ssh)
    else:
        source = str(recipe) if isinstance(recipe, Path) else recipe
        report = run_preflight(make_request(source, words, options))
    # All hosts have the same report, and may share the file.
    if exclude_bad is not None and report.node == 0:
        _write_names(Path(exclude_bad), report.bad_hosts)
    return report


def _write_names(file: Path, names: Sequence[str]) -> None:
    from hlat.runtime.storage.local_files import write_atomic

    try:
        write_atomic(file, "".join(f"{name}\n" for name in names).encode())
    except OSError as error:
        raise StorageError(f"{file}: the names of bad hosts cannot be written: {error.strerror}.") from error


_LOG = logging.getLogger("hlat")


@dataclass(frozen=True)
class LocalLaunch:
    """Commands of the hosts of ``launch_local``, and how the run ended."""

    commands: tuple[str, ...]  # command of each host, as for a shell
    exit_code: int  # exit code of the run; 0 for a dry run


@checks_arguments
def launch_local(
    recipe: str | Path,
    overrides: Overrides = (),
    *,
    nodes: int | None = None,
    hosts: Sequence[str] = (),
    least: int | None = None,
    nproc: int = 1,
    ssh: str = "ssh -tt -o BatchMode=yes",
    program: str | None = None,
    dry_run: bool = False,
    show: Callable[[str], None] = _LOG.info,
    folder: str | Path = ".",
) -> LocalLaunch:
    """Train on several hosts, and wait for the end of the run.

    Args:
        recipe: a recipe file, or the name of a shipped recipe.
        overrides: changes of the recipe.
        nodes: number of hosts; without ``hosts``, so many supervisors are started on this machine, as a rehearsal.
        hosts: names of hosts, or "NAME=ADDRESS", reached with ``ssh``; they share the folder and have hlat installed.
        least: number of hosts with which the run goes on if others are lost; None for all.
        nproc: processes per host.
        ssh: command that runs another on a host; it gets the name and the command.
        program: command that runs hlat on the hosts; None for this Python's ``-m hlat``.
        dry_run: only return the commands.
        show: receives the lines that the hosts print; the default logs them.
        folder: working folder of the run on every host.

    Raises:
        LaunchError: an option is wrong (every problem is listed), or a host cannot be reached.
        RecipeError: the recipe has problems, or does not fit the number of processes.
    """
    from hlat.launch import LocalRequest, run_local

    words = tuple(override_words(overrides))
    request = LocalRequest(str(recipe), words, nodes, least, nproc, tuple(hosts), ssh, program)
    commands = request.commands(Path(folder).resolve())
    # Before any host is reached: a mistake in the recipe is reported once and at once.
    load_recipe(str(recipe), list(words), world=len(commands) * nproc)
    code = 0 if dry_run else run_local(commands, show)
    return LocalLaunch(tuple(map(str, commands)), code)


Variables = Sequence[str] | Mapping[str, str]
"""Environment variables: ``["NCCL_DEBUG=INFO"]``, or ``{"NCCL_DEBUG": "INFO"}``."""


@checks_arguments
def submit_slurm(
    recipe: str | Path,
    overrides: Overrides = (),
    *,
    nodes: int,
    nproc: int | None = None,
    least: int | None = None,
    instance: str | None = None,
    hardware: str | Path | None = None,
    environment: Variables = (),
    name: str | None = None,
    grace: int = 120,
    program: str | None = None,
    options: "SlurmOptions | None" = None,
    anyway: bool = False,
    dry_run: bool = False,
) -> "SlurmSubmission":
    """Submit a run to Slurm; the present folder is the working folder of the job.

    Args:
        recipe: a recipe file, or the name of a shipped recipe.
        overrides: changes of the recipe.
        nodes: number of machines.
        nproc: processes per machine; None for one per accelerator of the instance, or one.
        least: smallest number of machines with which the run goes on if others are lost; None for all.
        instance: name of the machines in the hardware catalog; sets their environment variables and options.
        hardware: file with a catalog on top of the one that ships with hlat.
        environment: variables for the processes; they replace those of the catalog.
        name: name of the job; None for the run's.
        grace: seconds before the end of the job at which the run is told to save.
        program: command that runs hlat on the machines; None for this Python's ``-m hlat``.
        options: further options of Slurm.
        anyway: only warn of a run that does not fit into the memory of the instance's devices.
        dry_run: only write the script.

    Returns:
        ``script``, ``job`` (its id; None for a dry run), ``run_dir``, and ``missing``: folders of the output that were
        not there, which submission makes and Slurm does not.

    Raises:
        LaunchError: an option is wrong (every problem is listed), or Slurm refuses the job.
        RecipeError: the recipe has problems, or does not fit the number of processes.
        StorageError: the run's folder cannot be written.
    """
    from hlat.launch import RunRequest, SlurmOptions, SlurmSubmission, batch_script, submit_script

    words, catalog, variables = tuple(override_words(overrides)), optional_text(hardware), _assignments(environment)
    request = RunRequest(
        str(recipe), words, nodes, nproc, instance, catalog, variables, name, grace, program, least, anyway
    )
    script = batch_script(request, SlurmOptions() if options is None else options, Path.cwd())
    # Found before submission, which makes them.
    missing = tuple(folder for folder in script.folders if not folder.is_dir())
    return SlurmSubmission(script.text, None if dry_run else submit_script(script), script.run_dir, missing)


@checks_arguments
def submit_kubernetes(
    recipe: str | Path,
    overrides: Overrides = (),
    *,
    nodes: int,
    options: "KubernetesOptions",
    nproc: int | None = None,
    instance: str | None = None,
    hardware: str | Path | None = None,
    environment: Variables = (),
    name: str | None = None,
    grace: int = 120,
    program: str | None = None,
    least: int | None = None,
    anyway: bool = False,
    dry_run: bool = False,
) -> str:
    """Give a run to Kubernetes with ``kubectl apply``; return its manifests as YAML.

    Args:
        recipe: as for ``submit_slurm``; the manifests contain it with all defaults filled in.
        nodes: number of pods, each of which takes a machine.
        options: image, kind of job, volumes and other options of Kubernetes.
        instance: as for ``submit_slurm``; sets environment variables, resources and labels of the nodes.
        name: name of the job, a DNS label; None for the run's.
        grace: seconds that a pod has to save when Kubernetes ends it.
        program: command that runs hlat in the image; None for ``hlat``.
        dry_run: only write the manifests.
        overrides, nproc, hardware, environment, least, anyway: as for ``submit_slurm``.

    Raises:
        LaunchError: an option is wrong (every problem is listed), or kubectl fails.
        RecipeError: the recipe has problems, or does not fit the number of processes.
    """
    from hlat.launch import RunRequest, apply_manifests, manifests, manifests_yaml

    words, catalog, variables = tuple(override_words(overrides)), optional_text(hardware), _assignments(environment)
    request = RunRequest(
        str(recipe), words, nodes, nproc, instance, catalog, variables, name, grace, program, least, anyway
    )
    text = manifests_yaml(manifests(request, options))
    if not dry_run:
        apply_manifests(text)
    return text


def _assignments(variables: Variables) -> tuple[str, ...]:
    if isinstance(variables, Mapping):
        return tuple(f"{name}={value}" for name, value in variables.items())
    return tuple(variables)
