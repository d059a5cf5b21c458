"""``hlat train``: the recipe's run, from its beginning or from where it was interrupted."""

import signal

import typer

from hlat.cli.common import OverridesArgument, RecipeArgument, data_progress, say
from hlat.config import load_recipe
from hlat.training import Outcome, run


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(train)


def train(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Train. The same command again resumes an interrupted run."""
    resolved = load_recipe(recipe, overrides or [])
    outcome = run(resolved, data_progress=data_progress)
    say(summary(outcome))
    if outcome.reason in signal.Signals.__members__:
        raise typer.Exit(128 + signal.Signals[outcome.reason])


def summary(outcome: Outcome) -> str:
    """How the run ended, in a line or two."""
    if outcome.finished:
        text = f"finished at step {outcome.step}"
    else:
        text = f"stopped at step {outcome.step} of {outcome.total_steps} ({outcome.reason}); the same command goes on"
    if outcome.validation is not None:
        validation = outcome.validation
        text += f"; validation loss {validation.loss:.4f}, {validation.bits_per_byte:.4f} bits per byte"
    return f"{text}\ncheckpoint {outcome.checkpoint}" if outcome.checkpoint is not None else text
