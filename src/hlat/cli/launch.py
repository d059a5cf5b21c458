"""``hlat launch slurm|kubernetes|status|logs|cancel``: a run on a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from hlat.cli.common import OverridesArgument, RecipeArgument, ready, say

app = typer.Typer(help="Submit a run to Slurm or Kubernetes.", no_args_is_help=True)

NodesOption = Annotated[int, typer.Option(help="Number of machines.", show_default=False)]
NprocOption = Annotated[
    int | None, typer.Option(help="Processes per machine; default: one per accelerator of the instance, or one.")
]
InstanceOption = Annotated[
    str | None,
    typer.Option(help="Kind of machine in the catalog (hlat hardware list): sets variables, accelerators, --nproc."),
]
HardwareOption = Annotated[
    Path | None, typer.Option(help="Your own catalog, on top of the one that ships with hlat.", metavar="FILE")
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Variable of the processes; replaces the catalog's. Repeat for several."),
]
NameOption = Annotated[str | None, typer.Option(help="Name of the job; default: the run's.")]
GraceOption = Annotated[int, typer.Option(help="Seconds before the end at which the run is told to save.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted.")]
RunArgument = Annotated[Path, typer.Argument(help="Run folder.", show_default=False)]


@app.command("slurm")
def slurm_command(
    recipe: RecipeArgument,
    nodes: NodesOption,
    overrides: OverridesArgument = None,
    nproc: NprocOption = None,
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
    dry_run: DryRunOption = False,
) -> None:
    """Submit a run to Slurm, with this folder as its working folder."""
    from hlat.api import submit_slurm
    from hlat.launch.submission import SlurmOptions

    ready()
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
    )
    done = submit_slurm(
        recipe,
        overrides or (),
        nodes=nodes,
        nproc=nproc,
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
    else:
        say(f"job {done.job}; follow it with `hlat launch status {done.run_dir}` and `hlat launch logs {done.run_dir}`")


@app.command("kubernetes")
def kubernetes_command(
    recipe: RecipeArgument,
    nodes: NodesOption,
    image: Annotated[str, typer.Option(help="Container image with hlat and bash.", show_default=False)],
    overrides: OverridesArgument = None,
    nproc: NprocOption = None,
    instance: InstanceOption = None,
    hardware: HardwareOption = None,
    env: EnvOption = None,
    name: NameOption = None,
    grace: GraceOption = 120,
    program: Annotated[str | None, typer.Option(help="Command that runs hlat in the image; default: hlat.")] = None,
    kind: Annotated[
        str, typer.Option(help="job (plain Kubernetes), jobset, or trainjob (Kubeflow Trainer v2).")
    ] = "job",
    namespace: Annotated[str | None, typer.Option(help="Namespace; default: kubectl's present one.")] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(metavar="CLAIM:/PATH", help="Persistent volume claim; one holds the run's folder."),
    ] = None,
    resource: Annotated[
        list[str] | None, typer.Option(metavar="NAME=COUNT", help="Resource of a pod; replaces the catalog's.")
    ] = None,
    node_selector: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Label of the nodes; replaces the catalog's.")
    ] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Submit a run to Kubernetes with kubectl: a Job, a JobSet, or a TrainJob of Kubeflow Trainer."""
    from hlat.api import submit_kubernetes
    from hlat.launch.submission import KubernetesOptions

    ready()
    text = submit_kubernetes(
        recipe,
        overrides or (),
        nodes=nodes,
        options=KubernetesOptions(
            image, kind, namespace, tuple(volume or ()), tuple(resource or ()), tuple(node_selector or ())
        ),
        nproc=nproc,
        instance=instance,
        hardware=hardware,
        environment=env or (),
        name=name,
        grace=grace,
        program=program,
        dry_run=dry_run,
    )
    say(text.rstrip("\n") if dry_run else "submitted; follow it with kubectl")


@app.command("status")
def status_command(run: RunArgument) -> None:
    """Show the newest Slurm job of a run."""
    from hlat.launch.submission import job_state

    ready()
    for found in job_state(run):
        say(f"job {found.job}: {found.state} ({found.reason}), exit code {found.exit_code}, restarts {found.restarts}")
        say(f"  nodes {found.nodes or 'none yet'}; end {found.end}; output {found.output}")


@app.command("logs")
def logs_command(
    run: RunArgument, lines: Annotated[int, typer.Option(min=1, help="Number of lines to show.")] = 50
) -> None:
    """Show the end of the output of a run's newest Slurm job."""
    from hlat.launch.submission import job_log

    ready()
    say(job_log(run, lines))


@app.command("cancel")
def cancel_command(run: RunArgument) -> None:
    """Cancel the newest Slurm job of a run: it saves and stops, if the cluster gives it the time."""
    from hlat.launch.submission import cancel_job

    ready()
    say(f"cancelled job {cancel_job(run)}")
