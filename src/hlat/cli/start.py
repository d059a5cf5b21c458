"""``hlat quickstart`` and ``hlat init``: verbs to begin with.

quickstart -> from nothing to a trained, evaluated, exported model
init       -> a first recipe for a folder of text and this machine
"""

from pathlib import Path
from typing import Annotated

import typer

from hlat.cli.options import check_outputs
from hlat.cli.terminal import VerboseOption, data_progress, opening_line, ready, say, whole_number
from hlat.runtime.process import be_verbose


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(quickstart)
    app.command()(init)


def quickstart(
    to: Annotated[Path, typer.Option(help="Folder for everything that it writes.")] = Path("quickstart"),
    steps: Annotated[
        int | None,
        typer.Option(
            parser=whole_number(2), metavar="N", help="Number of training steps; default: about two minutes of them."
        ),
    ] = None,
    verbose: VerboseOption = False,
) -> None:
    """Train a small model on this machine: no account, no GPU, no download."""
    if verbose:
        be_verbose()
    with opening_line("importing PyTorch"):
        from hlat.quickstart import run_quickstart
    ready(works=True)
    run_quickstart(to, say, data_progress, steps)


def _hours(text: str | float) -> float:
    """Parse a time to train, in hours: a number of them, or a duration as recipes take it."""
    from hlat.runtime.quantities import QuantityError, parse_seconds

    if not isinstance(text, str):
        return text
    try:
        found = float(text) if text.replace(".", "", 1).isdigit() else (parse_seconds(text) or 0.0) / 3600
    except QuantityError as error:
        raise typer.BadParameter(str(error)) from None
    if found < 0.01:
        raise typer.BadParameter(f"{text} is no time of at least 36 s; write hours, as in 2, or 90min, 2h, 1d")
    return found


def init(
    texts: Annotated[str, typer.Argument(help="The corpus: a file, folder or glob.", show_default=False)],
    to: Annotated[Path, typer.Option(help="Recipe file to write; must not exist.")] = Path("recipe.yaml"),
    hours: Annotated[
        float, typer.Option(parser=_hours, metavar="TIME", help="Time to train: 2h, 90min, 1d; a number is hours.")
    ] = 1.0,
    start: Annotated[
        str | None,
        typer.Option("--from", help="Model to continue from: checkpoint, Hugging Face folder, or id of the Hub."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Preset or config.json of a new model; default: chosen.")] = None,
    column: Annotated[str | None, typer.Option(help="Column or key of the text; default: the usual names.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; default: that of the recipe file.")] = None,
    device: Annotated[str, typer.Option(help="Device type, as run.device takes it.")] = "auto",
) -> None:
    """Write a commented recipe for a corpus: model, batch and rate for this machine and a time."""
    import hlat
    from hlat.runtime.errors import StorageError

    ready(works=True)
    if to.exists():
        raise StorageError(f"{to} exists; name a new file with --to, or remove it first")
    check_outputs((to,))
    text = hlat.draft_recipe(
        texts, name=name or to.stem, hours=hours, column=column, start=start, model=model, device=device
    )
    try:
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{to} cannot be written: {error}") from error
    say(text.rstrip())
    say(f"\nwritten to {to}. Next: hlat check {to}, then hlat train {to}")
