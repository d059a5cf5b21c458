"""``hlat recipe``: recipes made from the configurations of other programs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hlat.cli.common import OverridesArgument, ready, say
from hlat.cli.plan_options import check_outputs

app = typer.Typer(help="Make recipes from the configurations of other programs.", no_args_is_help=True)


@app.command("from-nxdt")
def from_nxdt(
    source: Annotated[str, typer.Argument(help="YAML configuration of NxDT.", show_default=False)],
    overrides: OverridesArgument = None,
    to: Annotated[Path | None, typer.Option(help="Recipe file to write; default: print it.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Preset or config.json of the model; default: the file's model.model_config.")
    ] = None,
) -> None:
    """Translate a configuration of NxDT to a recipe, and list what has no counterpart."""
    from hlat.config.nxdt import recipe_from_nxdt
    from hlat.runtime import StorageError

    ready()
    if to is not None and to.exists():
        raise StorageError(f"{to} exists; name a new file, or remove it first")
    check_outputs((to,))
    found = recipe_from_nxdt(source, overrides or [], model)
    if to is None:
        say(found.text(source).rstrip())
        return
    try:
        to.write_text(found.text(source), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{to} cannot be written: {error}") from error
    _list("not quite the same", found.differs)
    _list("without counterpart", found.lost)
    _list("to be added or changed before it runs", found.missing)
    say(f"{len(found.unneeded)} settings need no counterpart; the rest is in {to}")
    world = "" if found.world is None else f" --world {found.world}"
    say(f"next: hlat check {to}{world}")


def _list(head: str, entries: Sequence[object]) -> None:
    if entries:
        say(f"{head}:")
    for entry in entries:
        say(f"  {entry}")
