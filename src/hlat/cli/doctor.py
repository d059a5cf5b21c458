"""``hlat doctor``: examine hosts, devices, network and disk before a run, and name the bad host."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hlat.cli.options import RANGE, HardwareOption, JsonOption, NodeOption, PortOption
from hlat.cli.terminal import complain, ready, say
from hlat.runtime.terminal import be_verbose

if TYPE_CHECKING:
    from hlat.launch import PreflightReport


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(doctor)


def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(help="Recipe file, or the name of a shipped recipe; default: the machines alone."),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides, as in run.dir=/shared/run")] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Start the command on these hosts and merge the reports.")
    ] = None,
    ssh: Annotated[
        str, typer.Option(metavar="COMMAND", help="Transport of --hosts: gets a host and the words of a command.")
    ] = "ssh -o BatchMode=yes",
    nodes: Annotated[
        str | None,
        typer.Option(metavar=RANGE, help="Number of hosts that start this command (or MAX); default: Slurm's, or 1."),
    ] = None,
    node: NodeOption = None,
    name: Annotated[
        str | None, typer.Option(help="Name of this host in the report; default: that of Slurm, or the host's own.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Processes per host; default: one per device of --instance, or one.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Address of this host to listen on; default: of GLOO_SOCKET_IFNAME, or of the host's name."),
    ] = None,
    port: PortOption = 0,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder to examine without a recipe; default: this one.")
    ] = None,
    instance: Annotated[
        str | None, typer.Option(help="Kind of machine in the catalog, for the rates of its links and its devices.")
    ] = None,
    hardware: HardwareOption = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for other hosts, and for collectives.")] = 60.0,
    exclude_bad: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the names of bad hosts to FILE; succeed if a good one is left."),
    ] = None,
    as_json: JsonOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List every finding, and checks that were not judged.")
    ] = False,
) -> None:
    """Examine everything a run needs: devices, network, disk, clocks, software, leftovers; name the bad host.

    Start it once on every host, as with srun --ntasks-per-node=1 or --nodes and --node, or name the hosts with --hosts.
    """
    from hlat.api import doctor as examine
    from hlat.launch import PreflightOptions, parse_range

    ready(works=not as_json)  # the exit code is the verdict
    if verbose:
        be_verbose()
    count = None if nodes is None else parse_range("--nodes", nodes, "hosts", "2:4")[1]
    options = PreflightOptions(
        nproc, count, node, name, address, port, run_dir, instance, None if hardware is None else str(hardware), wait
    )
    report = examine(
        recipe,
        overrides or (),
        options=options,
        hosts=() if hosts is None else hosts.split(","),
        ssh=ssh,
        exclude_bad=exclude_bad,
    )
    _show(report, as_json, verbose)
    # With a list of bad hosts the run can start on the others.
    is_enough = exclude_bad is not None and (report.node != 0 or len(report.bad_hosts) < len(report.hosts))
    raise typer.Exit(0 if report.ok or is_enough else 1)


def _show(report: "PreflightReport", as_json: bool, verbose: bool) -> None:
    # All hosts have the same report: host 0 prints it. Another one does only if it could not meet host 0.
    if report.node != 0 and not report.is_partial:
        return
    show = say if report.node == 0 else complain
    if as_json:
        show(json.dumps(report.to_dict()))
        return
    for line in report.lines():
        show(line)
    for number, why in report.skipped if verbose else ():
        show(f"{number}: {why}")
