"""``hlat launch kubernetes``: a run as a job of Kubernetes."""

from typing import Annotated

import typer

from hlat.cli.common import OverridesArgument, RecipeArgument, ready, say
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


def kubernetes_command(
    recipe: RecipeArgument,
    nodes: NodesOption,
    image: Annotated[str, typer.Option(help="Container image with hlat.", show_default=False)],
    overrides: OverridesArgument = None,
    nproc: NprocOption = None,
    least: LeastOption = None,
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
    no_probes: Annotated[
        bool, typer.Option("--no-probes", help="Leave out probes, and tracking.prometheus, which answers them.")
    ] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Submit a run to Kubernetes with kubectl: a Job, a JobSet, or a TrainJob of Kubeflow Trainer."""
    from hlat.api import submit_kubernetes
    from hlat.launch import KubernetesOptions

    ready(works=not dry_run)
    text = submit_kubernetes(
        recipe,
        overrides or (),
        nodes=nodes,
        options=KubernetesOptions(
            image,
            kind,
            namespace,
            tuple(volume or ()),
            tuple(resource or ()),
            tuple(node_selector or ()),
            probes=not no_probes,
        ),
        nproc=nproc,
        instance=instance,
        hardware=hardware,
        environment=env or (),
        name=name,
        grace=grace,
        program=program,
        least=least,
        dry_run=dry_run,
    )
    say(text.rstrip("\n") if dry_run else "submitted; follow it with kubectl")
