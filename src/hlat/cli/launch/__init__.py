"""``hlat launch``: a run on several hosts; ``hlat sweep``: several runs."""

import typer

from hlat.cli.launch import sweep
from hlat.cli.launch.kubernetes import kubernetes_command
from hlat.cli.launch.local import local_command
from hlat.cli.launch.slurm import cancel_command, logs_command, slurm_command, status_command

__all__ = ["launch_app", "sweep"]

launch_app = typer.Typer(
    help="Submit a run to Slurm or Kubernetes, or start it on hosts without a scheduler.", no_args_is_help=True
)
launch_app.command("slurm")(slurm_command)
launch_app.command("kubernetes")(kubernetes_command)
launch_app.command("local")(local_command)
launch_app.command("status")(status_command)
launch_app.command("logs")(logs_command)
launch_app.command("cancel")(cancel_command)
