"""``hlat ladder``: small runs of a recipe, the law of loss that they give, and the forecast of the recipe.

recipe, --budget -> design -> runs, here or as elements of a job array -> table, law, forecast, ladder.json
--dry-run: the design alone; --list: what the runs have reached; --coordinates: the check of optimizer.transfer
"""

import json
from typing import Annotated

import typer

from hlat.cli.options import DryRunOption, JsonOption, SbatchOption
from hlat.cli.terminal import OverridesArgument, RecipeArgument, data_progress, opening_line, ready, say
from hlat.cli.train import submit_array
from hlat.runtime.errors import LaunchError
from hlat.runtime.terminal import plural


def register(app: typer.Typer) -> None:
    """Add the verb of this module."""
    app.command()(ladder)


def ladder(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time of all runs together on this machine, as in 2h.")
    ] = None,
    flops: Annotated[str | None, typer.Option(metavar="N", help="Instead: FLOPs of all runs, as in 1e18.")] = None,
    sizes: Annotated[
        str,
        typer.Option(metavar="LIST", help="Parameters, as in 1M,3M,10M, or widths, as in w128,w256; auto: by budget."),
    ] = "auto",
    tokens: Annotated[
        str, typer.Option(metavar="LIST", help="Tokens per parameter, as in 5,10,20,40; auto: by budget.")
    ] = "auto",
    to: Annotated[str | None, typer.Option(help="Folder of the runs; default: runs/NAME-ladder.")] = None,
    nproc: Annotated[str | None, typer.Option(metavar="N", help="Processes of each run, as for hlat train.")] = None,
    only: Annotated[
        int | None, typer.Option(min=0, help="Train only the runs of the size of this number, from 0.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Train nothing: show what the runs have reached.")] = False,
    as_json: JsonOption = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit a job array, an element for each size.")] = False,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="With --slurm: sizes at the same time; default: as many as Slurm starts.")
    ] = None,
    sbatch: SbatchOption = None,
    dry_run: DryRunOption = False,
    coordinates: Annotated[
        bool,
        typer.Option(
            "--coordinates", help="Instead: check optimizer.transfer by a few steps of small models, a minute."
        ),
    ] = False,
) -> None:
    """Train small models of a recipe, and forecast its loss from them. The same command again goes on.

    Text is prepared first. With --budget, that and timing a few steps is done by --dry-run too.
    """
    if coordinates:
        _check_coordinates(recipe, overrides or [], as_json=as_json)
        return
    from hlat.ladder import (
        LadderQuestion,
        LadderReport,
        array_of_sizes,
        design_lines,
        plan_ladder,
        read_results,
        record_results,
        run_ladder,
    )

    ready(works=not show)
    if not slurm and (at_once is not None or sbatch):
        raise LaunchError("--at-once and --sbatch belong to --slurm. Add it, or leave them out.")
    if slurm and budget is not None:
        raise LaunchError("--slurm: speeds are not measured on a login node. Give --flops instead of --budget.")
    options = () if nproc is None else ("--nproc", nproc)
    speak = (lambda _: None) if as_json else say
    question = LadderQuestion(recipe, tuple(overrides or ()), budget, flops, sizes, tokens, to)
    with data_progress() as progress:
        plan = plan_ladder(question, options=options, keep=not dry_run, found_only=show, say=speak, progress=progress)
    if only is not None and only >= len(plan.by_size()):
        last = len(plan.by_size()) - 1
        raise LaunchError(f"--only {only}: the ladder has {plural(last + 1, 'size')}. Use 0 to {last}.")
    if slurm:
        words = overrides or ()
        submit_array(array_of_sizes(plan), words, nproc, sbatch, at_once, dry_run=dry_run, verb="ladder")
        return
    if dry_run:
        report = LadderReport(plan, tuple(read_results(plan)))
        say(json.dumps(report.to_dict(), indent=2) if as_json else "\n".join(design_lines(plan)))
        return
    results = read_results(plan) if show else run_ladder(plan, speak, only=only, options=options)
    report = LadderReport(plan, tuple(results))
    say(json.dumps(report.to_dict(), indent=2) if as_json else "\n".join(report.lines()))
    if show:
        record_results(plan, results)  # last: the folder may be one that can only be read
    failed = [result.exit_code for result in results if result.exit_code]
    raise typer.Exit(failed[-1] if failed else 0)


def _check_coordinates(recipe: str, overrides: list[str], *, as_json: bool) -> None:
    from hlat.config import load_recipe
    from hlat.ladder import coordinate_lines, coordinate_table, coordinates_json

    ready(works=True)
    with opening_line("measuring", draws=not as_json):
        table = coordinate_table(load_recipe(recipe, overrides))
    say(json.dumps(coordinates_json(table), indent=2) if as_json else "\n".join(coordinate_lines(table)))
    raise typer.Exit(1 if table.broken else 0)
