"""``hlat launch``: a run on a cluster."""

import typer

from hlat.cli.launch.kubernetes import kubernetes_command
from hlat.cli.launch.slurm import cancel_command, logs_command, slurm_command, status_command

__all__ = ["app"]

app = typer.Typer(help="Submit a run to Slurm or Kubernetes.", no_args_is_help=True)
app.command("slurm")(slurm_command)
app.command("kubernetes")(kubernetes_command)
app.command("status")(status_command)
app.command("logs")(logs_command)
app.command("cancel")(cancel_command)
