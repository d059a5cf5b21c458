"""Preflight of hosts before a run.

recipe, options --doctor--> PreflightReport, names of bad hosts in a file
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.api.arguments import checks_arguments
from hlat.api.recipes import Overrides, override_words
from hlat.config import Recipe
from hlat.runtime.errors import LaunchError, StorageError

if TYPE_CHECKING:
    from hlat.launch import PreflightOptions, PreflightReport


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
        if isinstance(recipe, Recipe):
            raise LaunchError("hosts load the recipe themselves: give the path of its file.")
        report = examine_by_ssh(hosts, None if recipe is None else str(recipe), words, options, ssh)
    else:
        source = str(recipe) if isinstance(recipe, Path) else recipe
        report = run_preflight(make_request(source, words, options))
    if exclude_bad is not None and report.node == 0:
        _write_names(Path(exclude_bad), report.bad_hosts)
    return report


def _write_names(file: Path, names: Sequence[str]) -> None:
    from hlat.data import write_atomic

    try:
        write_atomic(file, "".join(f"{name}\n" for name in names).encode())
    except OSError as error:
        raise StorageError(f"{file}: the names of bad hosts cannot be written: {error.strerror}.") from error
