"""Verbs to begin with, and those about recipes.

quickstart -> from nothing to a trained, evaluated, exported model
init       -> a first recipe for a folder of text and this machine
check      -> everything that is wrong with a recipe, or a summary
schema     -> the JSON schema of recipes
recipe     -> presets; a recipe from the configuration of another program
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hlat
from hlat.cli.options import JsonOption, WorldOption, check_outputs, write_output
from hlat.cli.terminal import (
    OverridesArgument,
    RecipeArgument,
    VerboseOption,
    count,
    data_progress,
    opening_line,
    ready,
    say,
    show_notes,
)
from hlat.runtime.errors import StorageError
from hlat.runtime.terminal import TABLE_ROWS, be_verbose, first_of, is_verbose, plural

if TYPE_CHECKING:
    from hlat.config import Recipe, SettingNote, StagePlace

translations = typer.Typer(
    help="List presets, and make recipes from the configurations of other programs.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(quickstart)
    app.command()(init)
    app.command()(check)
    app.command()(schema)
    app.add_typer(translations, name="recipe")


def quickstart(
    to: Annotated[Path, typer.Option(help="Folder for everything that it writes.")] = Path("quickstart"),
    steps: Annotated[int | None, count("Number of training steps; default: about two minutes of them.", 2)] = None,
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
    texts: Annotated[
        list[str],
        typer.Argument(help="The corpus: files, folders or globs, also of several formats.", show_default=False),
    ],
    to: Annotated[Path, typer.Option(help="Recipe file to write; must not exist.")] = Path("recipe.yaml"),
    hours: Annotated[
        float,
        typer.Option("--time", parser=_hours, metavar="TIME", help="Time to train: 2h, 90min, 1d; a number is hours."),
    ] = 1.0,
    start: Annotated[
        str | None,
        typer.Option("--from", help="Model to continue from: checkpoint, Hugging Face folder, or id of the Hub."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Preset or config.json of a new model; default: chosen.")] = None,
    column: Annotated[
        str | None, typer.Option("--text-column", help="Column or key of the text; default: the usual names.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; default: that of the recipe file.")] = None,
    device: Annotated[str, typer.Option(help="Device type, as run.device takes it.")] = "auto",
) -> None:
    """Write a commented recipe for a corpus: model, batch and rate for this machine and a time."""
    ready(works=True)
    if to.exists():
        raise StorageError(f"{to} exists; name a new file with --to, or remove it first")
    check_outputs((to,))
    with opening_line("looking at the text and measuring this machine"):
        text = hlat.draft_recipe(
            texts, name=name or to.stem, hours=hours, column=column, start=start, model=model, device=device
        )
    write_output(to, text)
    say(text)
    say(f"written to {to}. Next: hlat check {to}, then hlat train {to}")


def check(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    world: WorldOption = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes on this machine, as in hlat train --nproc; default: one.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="INSTANCE:N", help="Machines of the run, as for hlat plan: memory and time there."),
    ] = None,
    no_files: Annotated[
        bool, typer.Option("--no-files", help="Check the recipe alone: no files, no device, memory or disk (for CI).")
    ] = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Check a recipe and that it can start here: print everything that is wrong (exit code 2), or a summary."""
    if verbose:
        be_verbose()
    ready(works=not as_json)  # the exit code is the verdict
    from hlat.hardware import load_catalog, parse_cluster
    from hlat.planner import load_run_recipe, resolve_defaults

    cluster = None if on is None else parse_cluster(on, load_catalog())
    if cluster is not None and (world or nproc or 1) > cluster.devices:
        raise typer.BadParameter(f"{on} has {cluster.devices} devices, and the run {world or nproc} processes")
    asked = world or nproc or (None if cluster is None else cluster.devices)
    load = partial(load_run_recipe, recipe, overrides or [], world=asked)
    # With a world of other machines, the device, memory and disk here say nothing.
    is_here = not no_files and cluster is None and (nproc is not None or world is None)
    lines: list[tuple[str, str]] = []
    notes: Sequence[SettingNote] = ()
    if no_files and cluster is None:
        resolved, choices = resolve_defaults(load(), asked, here=False)
        lines += [("chosen", str(choice)) for choice in choices]
    else:
        from hlat.launch import Here, load_and_check, summary_lines

        here = Here(nproc or 1 if is_here else None, asked or 1, cluster, files=not no_files)
        with opening_line(f"checking {recipe}"):
            report = load_and_check(load, here)
            lines += summary_lines(report, here)
        resolved, notes = report.recipe, report.notes
    if resolved.own_parts:
        from hlat.launch import check_extensions

        with opening_line("importing the parts of your own"):
            check_extensions(resolved, asked or resolved.parallel.model_ranks)
    if as_json:
        say(json.dumps(resolved.model_dump(mode="json"), indent=2))
        return
    from hlat.config import numbers_with_units, odd_settings
    from hlat.model import count_parameters, scale_lines

    say(f"{recipe}: good{' (the recipe alone: --no-files)' if no_files else ''}")
    say(f"  model  {count_parameters(resolved.model).total:,} parameters")
    for name, line in _run(resolved, asked):
        say(f"  {name:6} {line}")
    say(f"  precision {_precision(resolved)}")
    for line in _determinism(resolved, asked or resolved.parallel.model_ranks) if is_here else ():
        say(f"  speed  {line}")
    if cluster is None and not is_here and asked is not None:
        lines.insert(0, ("memory", "not checked: --on INSTANCE:N names the machines, as in --on p5.48xlarge:4"))
    lines += [("rates", line) for line in (scale_lines(resolved.model, resolved.optimizer) if is_verbose() else ())]
    for name, line in lines:
        say(f"  {name:6} {line}")
    say(f"  folder {resolved.run_dir}")
    read, more = first_of(sorted(numbers_with_units(recipe, overrides or [], resolved)), TABLE_ROWS)
    for path, text, number in read:
        say(f"  read   {path}: {text} = {number:,}")
    if more:
        say(f"  read   {more} numbers with a unit")
    show_notes([*odd_settings(resolved), *notes])


def _run(recipe: "Recipe", world: int | None) -> Iterator[tuple[str, str]]:
    """Yield name and text of the lines about the length of a run and of its stages, and about layouts."""
    length = plural(recipe.total_steps, "step") if recipe.stages else recipe.steps_and_tokens
    yield "run", f"{length} = {recipe.total_tokens:,} tokens"
    if recipe.stages:
        yield from (("stage", line) for line in recipe.by_stage(_of_stage))
    if world is not None or any(stage.parallel.model_ranks > 1 for stage in recipe.each_stage()):
        yield from (("layout", line) for line in recipe.by_stage(partial(_layout, world=world)))


def _of_stage(recipe: "Recipe") -> str:
    assert recipe.place is not None, "a stage of a run"
    steps = plural(recipe.place.steps, "step")
    sequences = f"{plural(recipe.batch.global_batch, 'sequence')} of {recipe.data.sequence_length:,} tokens each"
    return f"{steps} of {sequences} = {recipe.stage_tokens:,} tokens{_rates(recipe.place)}"


def _rates(place: "StagePlace") -> str:
    """Describe the learning rates of the first and the last step of a stage."""
    from hlat.optim import placed, rate_at

    stages = place.run.each_stage()
    # Those of the user's own are imported by a process of its own.
    if any(stage.schedule.kind in stage.own_parts for stage in stages):
        return ""
    recipe = placed(stages[place.index])
    return f"; learning rate {rate_at(recipe, place.first + 1):.3g} to {rate_at(recipe, place.stop):.3g}"


def _precision(recipe: "Recipe") -> str:
    mode = recipe.precision.mode
    return "auto: mixed where every device has fast bf16, else fp32" if mode == "auto" else mode


def _determinism(recipe: "Recipe", world: int) -> Iterator[str]:
    from hlat.runtime.backend.table import expects_accelerator

    if not expects_accelerator(recipe.run.device):
        return
    from hlat.hardware import installed_chip, load_catalog

    if (chip := installed_chip(load_catalog())) is None:
        return
    from hlat.checkpoint import find_saved_recipe, saved_determinism
    from hlat.planner import run_determinism_cost

    # A run keeps what its auto was resolved to.
    begun = find_saved_recipe(recipe.run_dir) if recipe.run.determinism is None else None
    if begun is not None:
        recipe = recipe.with_determinism(saved_determinism(begun))
    if (cost := run_determinism_cost(recipe, chip, world)) is None:
        return
    if begun is not None:
        yield f"run.deterministic=auto: {str(cost.chosen).lower()}, which the run in {recipe.run_dir} began with"
    yield str(cost)


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


@translations.command("presets")
def presets() -> None:
    """List the models that model.preset names, with their sizes."""
    from hlat.config import PRESETS, model_section
    from hlat.model import count_parameters

    ready()
    for name in PRESETS:
        model = model_section(name)
        sizes = f"{count_parameters(model).total / 1e9:8.3f} B  {model.layers:3} x {model.hidden_size:<5}"
        heads = f"{model.heads:3} heads, {model.n_kv_heads:3} for keys"
        say(f"{name:<15}{sizes}  {heads}  vocabulary {model.vocab_size:,}")


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
    from hlat.config import recipe_from_nxdt

    ready()
    if to is not None and to.exists():
        raise StorageError(f"{to} exists; name a new file, or remove it first")
    check_outputs((to,))
    found = recipe_from_nxdt(source, overrides or [], model)
    if to is None:
        say(found.text(source).rstrip())
        return
    write_output(to, found.text(source))
    _list("not quite the same", found.differs)
    _list("without counterpart", found.lost)
    _list("to be added or changed before it runs", found.missing)
    need = "needs" if len(found.unneeded) == 1 else "need"
    say(f"{plural(len(found.unneeded), 'setting')} {need} no counterpart; the rest is in {to}")
    world = "" if found.world is None else f" --world {found.world}"
    say(f"next: hlat check {to}{world}")


def _list(head: str, entries: Sequence[object]) -> None:
    if entries:
        say(f"{head}:")
    for entry in entries:
        say(f"  {entry}")
