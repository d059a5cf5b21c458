"""Training on several hosts that are started from here.

recipe, names of hosts --launch_local--> one ``hlat train`` per host, which meet in the run's folder
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hlat.api.arguments import checks_arguments
from hlat.api.recipes import Overrides, override_words
from hlat.config import load_recipe

_LOG = logging.getLogger("hlat")


@dataclass(frozen=True)
class LocalLaunch:
    """Result of ``launch_local``.

    Attributes:
        commands: command of each host, as for a shell.
        exit_code: exit code of the run; 0 for a dry run.
    """

    commands: tuple[str, ...]
    exit_code: int


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
    load_recipe(str(recipe), list(words), world=len(commands) * nproc)
    code = 0 if dry_run else run_local(commands, show)
    return LocalLaunch(tuple(map(str, commands)), code)
