"""``hlat launch local``: a run on hosts that are started from here, without a scheduler."""

from pathlib import Path
from typing import Annotated

import typer

from hlat.cli.common import OverridesArgument, RecipeArgument, ready, say


def local_command(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Number of hosts; without --hosts, so many supervisors on this machine, to rehearse."),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Hosts to reach over ssh, or NAME=ADDRESS; they share this folder."),
    ] = None,
    least: Annotated[
        int | None, typer.Option(metavar="N", help="Go on with as few hosts as this if others are lost; default: all.")
    ] = None,
    nproc: Annotated[int, typer.Option(help="Processes per host.")] = 1,
    ssh: Annotated[
        str, typer.Option(help="Command that runs another on a host, given its name and that command.")
    ] = "ssh -tt -o BatchMode=yes",
    program: Annotated[str | None, typer.Option(help="Command that runs hlat on the hosts.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command of each host.")] = False,
) -> None:
    """Train on several hosts, started from here and in this folder."""
    from hlat.api import launch_local

    ready(works=not dry_run)
    names = tuple(hosts.split(",")) if hosts else ()
    done = launch_local(
        recipe,
        overrides or (),
        nodes=nodes,
        hosts=names,
        least=least,
        nproc=nproc,
        ssh=ssh,
        program=program,
        dry_run=dry_run,
        show=say,
        folder=Path.cwd(),
    )
    if dry_run:
        for command in done.commands:
            say(command)
    raise typer.Exit(done.exit_code)
