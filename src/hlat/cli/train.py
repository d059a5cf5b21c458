"""``hlat train``: the recipe's run, from its beginning or from where it was interrupted, in one process or several."""

import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from hlat.cli.common import OverridesArgument, RecipeArgument, data_progress, ready, say
from hlat.config import LaunchError, load_recipe
from hlat.runtime import place

if TYPE_CHECKING:
    from hlat.training import Outcome


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(train)


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="Train in so many processes on this machine, such as one per accelerator; default one."
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write a trace of steps 4 to 6, and where their time went, to the run.")
    ] = False,
) -> None:
    """Train. The same command again resumes an interrupted run."""
    if nproc is not None and nproc > 1:
        raise typer.Exit(_launch(recipe, overrides or [], nproc, profile))
    from hlat.launch import follow_launcher, reported
    from hlat.training import run

    ready()
    follow_launcher()
    with reported():
        here = place()
        resolved = load_recipe(recipe, overrides or [], world=here.world)
        outcome = run(resolved, data_progress=data_progress, profile=profile)
    if here.rank == 0:
        say(summary(outcome))
    if outcome.reason in signal.Signals.__members__:
        raise typer.Exit(128 + signal.Signals[outcome.reason])


def summary(outcome: "Outcome") -> str:
    """How the run ended, in a line or two."""
    if outcome.finished:
        text = f"finished at step {outcome.step}"
    else:
        text = f"stopped at step {outcome.step} of {outcome.total_steps} ({outcome.reason}); the same command goes on"
    if outcome.validation is not None:
        validation = outcome.validation
        text += f"; validation loss {validation.loss:.4f}, {validation.bits_per_byte:.4f} bits per byte"
    return f"{text}\ncheckpoint {outcome.checkpoint}" if outcome.checkpoint is not None else text


def _launch(recipe: str, overrides: list[str], nproc: int, profile: bool) -> int:
    set_already = [f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if set_already:
        message = (
            f"--nproc {nproc} starts the processes of a run, but this is one already: {', '.join(set_already)} is set."
        )
        raise LaunchError(f"{message} Under torchrun leave --nproc out; otherwise unset RANK and WORLD_SIZE.")
    resolved = load_recipe(recipe, overrides, world=nproc)  # what is wrong is said before any process starts
    from hlat.launch import launch_local

    ready()
    return launch_local(
        ["train", recipe, *overrides, *(["--profile"] if profile else [])], nproc, resolved.run_dir, _complain
    )


def _complain(message: str) -> None:
    with suppress(BrokenPipeError):
        sys.stdout.flush()
        typer.echo(message, err=True)
