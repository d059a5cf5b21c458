"""``hlat check``, ``hlat schema`` and ``hlat recipe``: validation and schema of recipes, and their translation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hlat
from hlat.cli.common import OverridesArgument, RecipeArgument, ready, say
from hlat.cli.plan_options import check_outputs

if TYPE_CHECKING:
    from hlat.config import Recipe

translations = typer.Typer(help="Make recipes from the configurations of other programs.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(check)
    app.command()(schema)
    app.add_typer(translations, name="recipe")


def check(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    world: Annotated[
        int | None, typer.Option(min=1, help="World size that the layout must fit: one process per accelerator.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the resolved recipe as JSON.")] = False,
) -> None:
    """Check a recipe: print all its errors (exit code 2), or a summary."""
    ready()
    resolved = hlat.load_recipe(recipe, overrides or [], world=world)
    if as_json:
        say(json.dumps(resolved.model_dump(mode="json"), indent=2))
        return
    from hlat.config.rules import recipe_notes
    from hlat.model.derived import count_parameters

    say(f"{recipe}: good")
    say(f"  model  {count_parameters(resolved.model).total:,} parameters")
    say(f"  run    {resolved.steps_and_tokens} = {resolved.total_tokens:,} tokens")
    if world is not None or resolved.parallel.model_ranks > 1:
        say(f"  layout {_layout(resolved, world)}")
    say(f"  precision {_precision(resolved)}")
    say(f"  folder {resolved.run_dir}")
    for note in recipe_notes(resolved):
        say(f"note: {note}")


def _precision(recipe: "Recipe") -> str:
    mode = recipe.precision.mode
    return "auto: mixed where every device has fast bf16, else fp32" if mode == "auto" else mode


def _layout(recipe: "Recipe", world: int | None) -> str:
    if world is None:
        return recipe.parallel.describe()
    count = recipe.micro_batches(world)
    layout = recipe.parallel.describe(recipe.data_parallel(world))
    after = " after the ramp" if recipe.batch.ramp else ""
    return f"{layout}, {count} micro-batch{'es' if count > 1 else ''}{after}"


def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    from hlat.config import recipe_schema

    say(json.dumps(recipe_schema(), indent=2))


@translations.command("from-nxdt")
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
