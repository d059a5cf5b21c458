"""Submission of runs to schedulers.

recipe, nodes, options --submit_slurm--------> batch script, job
                       --submit_kubernetes---> manifests
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.api.arguments import checks_arguments
from hlat.api.recipes import Overrides, override_words

if TYPE_CHECKING:
    from hlat.launch import KubernetesOptions, SlurmOptions, SlurmSubmission

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

    request = RunRequest(
        str(recipe),
        tuple(override_words(overrides)),
        nodes,
        nproc,
        instance,
        None if hardware is None else str(hardware),
        _assignments(environment),
        name,
        grace,
        program,
        least,
    )
    script = batch_script(request, SlurmOptions() if options is None else options, Path.cwd())
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
    dry_run: bool = False,
) -> str:
    """Give a run to Kubernetes with ``kubectl apply``; return its manifests as YAML.

    Args:
        recipe: as for ``submit_slurm``; the manifests contain it with all defaults filled in.
        overrides: as for ``submit_slurm``.
        nodes: number of pods, each of which takes a machine.
        options: image, kind of job, volumes and other options of Kubernetes.
        nproc: as for ``submit_slurm``.
        instance: as for ``submit_slurm``; sets environment variables, resources and labels of the nodes.
        hardware: as for ``submit_slurm``.
        environment: as for ``submit_slurm``.
        name: name of the job, a DNS label; None for the run's.
        grace: seconds that a pod has to save when Kubernetes ends it.
        program: command that runs hlat in the image; None for ``hlat``.
        least: as for ``submit_slurm``.
        dry_run: only write the manifests.

    Raises:
        LaunchError: an option is wrong (every problem is listed), or kubectl fails.
        RecipeError: the recipe has problems, or does not fit the number of processes.
    """
    from hlat.launch import RunRequest, apply_manifests, manifests, manifests_yaml

    request = RunRequest(
        str(recipe),
        tuple(override_words(overrides)),
        nodes,
        nproc,
        instance,
        None if hardware is None else str(hardware),
        _assignments(environment),
        name,
        grace,
        program,
        least,
    )
    text = manifests_yaml(manifests(request, options))
    if not dry_run:
        apply_manifests(text)
    return text


def _assignments(variables: Variables) -> tuple[str, ...]:
    """Variables as the command line has them."""
    if isinstance(variables, Mapping):
        return tuple(f"{name}={value}" for name, value in variables.items())
    return tuple(variables)
