"""``hlat average``: the average of several checkpoints."""

from typing import Annotated

import typer

from hlat.cli.common import WeightsOption, ready, say
from hlat.cli.model import Folder
from hlat.runtime import CheckpointError


def register(app: typer.Typer) -> None:
    """Add the verb of this module."""
    app.command()(average)


def average(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            help="Checkpoints (a run folder stands for its newest one), oldest first; or one run folder with --last.",
            show_default=False,
        ),
    ],
    to: Folder,
    last: Annotated[int | None, typer.Option(min=2, help="Average the newest N checkpoints of the run.")] = None,
    coefficients: Annotated[
        str | None, typer.Option(help="Factor of each checkpoint, as in 1,2,1; default: all equal.")
    ] = None,
    decay: Annotated[
        float | None, typer.Option(help="Exponential: each counts DECAY times as much as the next newer one.")
    ] = None,
    weights: WeightsOption = "model",
) -> None:
    """Average the weights of checkpoints of one model, saved in any layouts, into a new checkpoint."""
    import hlat.checkpoint

    ready()
    factors = None if coefficients is None else _numbers(coefficients)
    path = hlat.average(checkpoints, to, last=last, coefficients=factors, decay=decay, weights=weights)
    parents = hlat.checkpoint.open_unverified(path).meta["average"]
    for parent in parents:
        say(f"{parent['share']:8.2%} of step {parent['step']:,}, {parent['path']}")
    say(f"averaged to {path}")


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise CheckpointError(f"--coefficients {text}: not numbers. Write them with commas, as in 1,2,1.") from None
