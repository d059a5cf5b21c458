"""``hlat launch``: a run on several hosts.

slurm, status, logs, cancel -> a job of Slurm
kubernetes                  -> a Job, a JobSet, or a TrainJob
local                       -> hosts that are started from here, without a scheduler
"""

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from hlat.cli.options import (
    RANGE,
    AnywayOption,
    DryRunOption,
    EnvOption,
    GraceOption,
    HardwareOption,
    InstanceOption,
    NameOption,
    NodesOption,
    NprocOption,
    ProgramOption,
    SbatchOption,
)
from hlat.cli.terminal import OverridesArgument, RecipeArgument, complain, opening_line, ready, say

RunArgument = Annotated[Path, typer.Argument(help="Run folder.", show_default=False)]


class _Choices(logging.Handler):
    """Prints what a launch chooses on standard error, since standard output may be the script."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:  # others are printed already
            complain(record.getMessage(), "info")


@contextmanager
def _telling_choices() -> Iterator[None]:
    logger, handler = logging.getLogger("hlat.launch"), _Choices()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with opening_line("checking the run"):
            yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _job(context: typer.Context) -> dict[str, Any]:
    """Return the options that every scheduler takes, as the Python API names them."""
    same = ("nproc", "instance", "hardware", "name", "grace", "program", "anyway", "dry_run")
    given = {name: context.params[name] for name in same} | {"environment": context.params["env"] or ()}
    return given | _hosts(context.params["nodes"])


def _hosts(nodes: str) -> dict[str, int | None]:
    from hlat.launch import parse_range

    least, most = parse_range("--nodes", nodes, "hosts", "2:4")
    return {"nodes": most, "least": least if least < most else None}


def slurm_command(
    context: typer.Context,
    recipe: RecipeArgument,
    nodes: NodesOption,
    overrides: OverridesArgument = None,
    nproc: NprocOption = None,
    instance: InstanceOption = None,
    hardware: HardwareOption = None,
    env: EnvOption = None,
    name: NameOption = None,
    grace: GraceOption = 120,
    program: ProgramOption = None,
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
    to: Annotated[str, typer.Option(help="File for the output of the job, as sbatch --output takes it.")] = "%x-%j.log",
    sbatch: SbatchOption = None,
    srun: Annotated[list[str] | None, typer.Option(help="Further option of srun. Repeat for several.")] = None,
    setup: Annotated[
        list[str] | None, typer.Option(help="Shell command that the script runs first. Repeat for several.")
    ] = None,
    doctor: Annotated[
        bool, typer.Option("--doctor", help="Examine the nodes before the training, and leave bad ones out.")
    ] = False,
    anyway: AnywayOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Submit a run to Slurm, with this folder as its working folder."""
    from hlat.api import submit_slurm
    from hlat.launch import SlurmOptions

    ready(works=not dry_run)
    words = tuple(sbatch or ()), tuple(srun or ()), tuple(setup or ())
    options = SlurmOptions(time, chain, partition, account, qos, exclude, cpus_per_task, to, *words, doctor)
    with _telling_choices():
        done = submit_slurm(recipe, overrides or (), options=options, **_job(context))
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


def kubernetes_command(
    context: typer.Context,
    recipe: RecipeArgument,
    nodes: NodesOption,
    image: Annotated[str, typer.Option(help="Container image with hlat.", show_default=False)],
    overrides: OverridesArgument = None,
    nproc: NprocOption = None,
    instance: InstanceOption = None,
    hardware: HardwareOption = None,
    env: EnvOption = None,
    name: NameOption = None,
    grace: GraceOption = 120,
    program: ProgramOption = None,
    kind: Annotated[
        str, typer.Option(help="job (plain Kubernetes), jobset, or trainjob (Kubeflow Trainer v2).")
    ] = "job",
    namespace: Annotated[str | None, typer.Option(help="Namespace; default: kubectl's present one.")] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLAIM:/PATH", help="Persistent volume claim; one holds the run's folder. :/PATH is in the image."
        ),
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COUNT", help="Resource of a pod, cpu and memory too; replaces the catalog's."),
    ] = None,
    node_selector: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Label of the nodes; replaces the catalog's.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Label of all objects, as in kueue.x-k8s.io/queue-name=training."),
    ] = None,
    toleration: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE:EFFECT", help="Taint of nodes that the pods may run on, as in kubectl taint."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="Any other field: below pod, container or job, or of the submitted object, as in "
            "pod.spec.priorityClassName=high. Repeat for several.",
        ),
    ] = None,
    no_probes: Annotated[
        bool, typer.Option("--no-probes", help="Leave out probes, and tracking.prometheus, which answers them.")
    ] = False,
    anyway: AnywayOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Submit a run to Kubernetes with kubectl: a Job, a JobSet, or a TrainJob of Kubeflow Trainer."""
    from hlat.api import submit_kubernetes
    from hlat.launch import KubernetesOptions, pods_query

    ready(works=not dry_run)
    words = tuple(volume or ()), tuple(resource or ()), tuple(node_selector or ())
    more = tuple(label or ()), tuple(toleration or ()), tuple(changes or ())
    options = KubernetesOptions(image, kind, namespace, *words, not no_probes, *more)
    with _telling_choices():
        text = submit_kubernetes(recipe, overrides or (), options=options, **_job(context))
    say(text.rstrip("\n") if dry_run else f"submitted; its pods: {pods_query(text)}")


def local_command(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar=RANGE,
            help="Number of hosts; MIN:MAX goes on without those that are lost. Without --hosts, so many supervisors "
            "on this machine, to rehearse.",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Hosts to reach over ssh, or NAME=ADDRESS; they share this folder."),
    ] = None,
    nproc: Annotated[int, typer.Option(help="Processes per host.")] = 1,
    ssh: Annotated[
        str, typer.Option(help="Command that runs another on a host, given its name and that command.")
    ] = "ssh -tt -o BatchMode=yes",
    program: ProgramOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Train on several hosts, started from here and in this folder."""
    from hlat.api import launch_local

    ready(works=not dry_run)
    names = tuple(hosts.split(",")) if hosts else ()
    done = launch_local(
        recipe,
        overrides or (),
        hosts=names,
        **({} if nodes is None else _hosts(nodes)),
        nproc=nproc,
        ssh=ssh,
        program=program,
        dry_run=dry_run,
        show=say,
        folder=Path.cwd(),
    )
    if dry_run:
        for command in done.commands:
            say(command, exact=True)
    # The exit code of the run, so that scripts and schedulers can tell a stop from a failure.
    raise typer.Exit(done.exit_code)


launch_app = typer.Typer(
    help="Submit a run to Slurm or Kubernetes, or start it on hosts without a scheduler.", no_args_is_help=True
)
launch_app.command("slurm")(slurm_command)
launch_app.command("kubernetes")(kubernetes_command)
launch_app.command("local")(local_command)
launch_app.command("status")(status_command)
launch_app.command("logs")(logs_command)
launch_app.command("cancel")(cancel_command)
