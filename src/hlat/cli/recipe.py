"""``hlat check`` and ``hlat schema``: validation of a recipe, and the schema of recipe files."""

import json
from typing import Annotated

import typer

import hlat
from hlat.cli.common import OverridesArgument, RecipeArgument, ready, say
from hlat.config import Recipe, recipe_schema
from hlat.config.rules import recipe_notes


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(check)
    app.command()(schema)


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


def _precision(recipe: Recipe) -> str:
    mode = recipe.precision.mode
    return "auto: mixed where every device has fast bf16, else fp32" if mode == "auto" else mode


def _layout(recipe: Recipe, world: int | None) -> str:
    if world is None:
        return recipe.parallel.describe()
    count = recipe.micro_batches(world)
    layout = recipe.parallel.describe(recipe.data_parallel(world))
    after = " after the ramp" if recipe.batch.ramp else ""
    return f"{layout}, {count} micro-batch{'es' if count > 1 else ''}{after}"


def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    say(json.dumps(recipe_schema(), indent=2))
