"""``hlat rehearse``: a dry run of the real program at full size on this machine, with tensors that take no memory."""

import json
import os
from typing import Annotated

import typer

import hlat
from hlat.cli.common import OverridesArgument, RecipeArgument, ready, say


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(rehearse)


def rehearse(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    world: Annotated[
        int, typer.Option("--world-size", min=1, help="World size of the run: one process per accelerator.")
    ] = 1,
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            "--rank",
            min=0,
            help="Rank to rehearse; default: the first, the middle, the last and the one that needs most memory.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Run a training step of some ranks without devices: memory, communication, FLOPs, and errors."""
    resolved = hlat.load_recipe(recipe, overrides or [], world=world)
    from hlat.rehearsal import RankReport, report_lines

    ready()

    def show(report: RankReport) -> None:
        if not as_json:
            say("\n".join(report_lines(report)))

    found = hlat.rehearse(resolved, world=world, ranks=ranks or None, processes=os.cpu_count() or 1, on_report=show)
    if as_json:
        say(json.dumps(found.to_dict(), indent=2))
        return
    if resolved.batch.ramp:
        say(f"batch.ramp: rehearsed with the final batch of {resolved.batch.global_batch} sequences")
    if resolved.precision.mode != found.recipe.precision.mode:
        say(f"precision.mode=auto: rehearsed as {found.recipe.precision.mode}, its value on devices with fast bf16")
