"""``hlat launch slurm|status|logs|cancel``: a run as a job of Slurm."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from hlat.cli.common import OverridesArgument, RecipeArgument, complain, ready, say
from hlat.cli.launch.options import (
    DryRunOption,
    EnvOption,
    GraceOption,
    HardwareOption,
    InstanceOption,
    LeastOption,
    NameOption,
    NodesOption,
    NprocOption,
)

RunArgument = Annotated[Path, typer.Argument(help="Run folder.", show_default=False)]


def slurm_command(
    recipe: RecipeArgument,
    nodes: NodesOption,
    overrides: OverridesArgument = None,
    nproc: NprocOption = None,
    least: LeastOption = None,
    instance: InstanceOption = None,
    hardware: HardwareOption = None,
    env: EnvOption = None,
    name: NameOption = None,
    grace: GraceOption = 120,
    program: Annotated[
        str | None,
        typer.Option(help='Command that runs hlat on the machines, as in "apptainer exec --nv image.sif hlat".'),
    ] = None,
    time: Annotated[str | None, typer.Option(help="Time limit of a job, as sbatch takes it.")] = None,
    chain: Annotated[
        int | None,
        typer.Option(metavar="N", help="Up to N jobs, one after the other, instead of one that is queued again."),
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account to charge.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    exclude: Annotated[str | None, typer.Option(help="Nodes not to use, in Slurm's notation.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(help="CPU cores of each process.")] = None,
    output: Annotated[str, typer.Option(help="File for the output.")] = "%x-%j.log",
    sbatch: Annotated[list[str] | None, typer.Option(help="Further option of sbatch. Repeat for several.")] = None,
    srun: Annotated[list[str] | None, typer.Option(help="Further option of srun. Repeat for several.")] = None,
    setup: Annotated[
        list[str] | None, typer.Option(help="Shell command that the script runs first. Repeat for several.")
    ] = None,
    doctor: Annotated[
        bool, typer.Option("--doctor", help="Examine the nodes before the training, and leave bad ones out.")
    ] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Submit a run to Slurm, with this folder as its working folder."""
    from hlat.api import submit_slurm
    from hlat.launch import SlurmOptions

    ready(works=not dry_run)
    options = SlurmOptions(
        time,
        chain,
        partition,
        account,
        qos,
        exclude,
        cpus_per_task,
        output,
        tuple(sbatch or ()),
        tuple(srun or ()),
        tuple(setup or ()),
        doctor,
    )
    done = submit_slurm(
        recipe,
        overrides or (),
        nodes=nodes,
        nproc=nproc,
        least=least,
        instance=instance,
        hardware=hardware,
        environment=env or (),
        name=name,
        grace=grace,
        program=program,
        options=options,
        dry_run=dry_run,
    )
    if done.job is None:
        say(done.script.rstrip("\n"))
        if done.missing:
            folders = shlex.join(map(str, done.missing))
            complain(
                f"warning: Slurm makes no folders, and fails a job that lacks that of its output: mkdir -p {folders}"
            )
    else:
        say(f"job {done.job}; follow it with `hlat launch status {done.run_dir}` and `hlat launch logs {done.run_dir}`")


def status_command(run: RunArgument) -> None:
    """Show the newest Slurm job of a run."""
    from hlat.launch import job_state

    ready()
    for found in job_state(run):
        say(f"job {found.job}: {found.state} ({found.reason}), exit code {found.exit_code}, restarts {found.restarts}")
        say(f"  nodes {found.nodes or 'none yet'}; end {found.end}; output {found.output}")


def logs_command(
    run: RunArgument, lines: Annotated[int, typer.Option(min=1, help="Number of lines to show.")] = 50
) -> None:
    """Show the end of the output of a run's newest Slurm job."""
    from hlat.launch import job_log

    ready()
    say(job_log(run, lines))


def cancel_command(run: RunArgument) -> None:
    """Cancel the newest Slurm job of a run: it saves and stops, if the cluster gives it the time."""
    from hlat.launch import cancel_job

    ready(works=True)
    say(f"cancelled job {cancel_job(run)}")
