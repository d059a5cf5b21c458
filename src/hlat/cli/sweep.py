"""``hlat sweep``: a recipe trained with several values of some fields."""

import json
import subprocess
from typing import TYPE_CHECKING, Annotated

import typer

from hlat.cli.terminal import RecipeArgument, complain, ready, say
from hlat.runtime.terminal import plural

if TYPE_CHECKING:
    from hlat.sweep import Sweep, SweepResult


def register(app: typer.Typer) -> None:
    """Add the verb of this module."""
    app.command()(sweep)


def sweep(
    recipe: RecipeArgument,
    axes: Annotated[
        list[str],
        typer.Argument(
            metavar="FIELD=VALUES...",
            help="Values as in optimizer.lr=1e-3,2e-3 or training.seed=1..3; every combination is a run. "
            "A single value is an override of all runs.",
        ),
    ],
    to: Annotated[str | None, typer.Option(help="Folder of the runs; default: runs/NAME-sweep.")] = None,
    nproc: Annotated[str | None, typer.Option(metavar="N", help="Processes of each run, as for hlat train.")] = None,
    only: Annotated[int | None, typer.Option(min=0, help="Train only the run of this number, from 0.")] = None,
    show: Annotated[
        bool, typer.Option("--list", help="Train nothing: show the runs, and what they have reached.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit a job array, an element for each run.")] = False,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="With --slurm: runs at the same time; default: as many as Slurm starts.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="--OPTION=VALUE", help="With --slurm: option of sbatch, as in --sbatch=--time=2:00:00; repeatable."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --slurm: print the script, submit nothing.")] = False,
) -> None:
    """Train a recipe with several values of some fields. The same command again goes on where it stopped."""
    from hlat.launch import parse_nproc
    from hlat.runtime.errors import LaunchError
    from hlat.sweep import accelerator_warning, plan_sweep, run_sweep, sweep_results

    ready(works=not (show or as_json or dry_run))
    if not slurm and (at_once is not None or sbatch or dry_run):
        raise LaunchError("--at-once, --sbatch and --dry-run belong to --slurm. Add it, or leave them out.")
    planned = plan_sweep(recipe, axes, to)
    if len(planned.runs) == 1:
        complain("warning: no field has several values, so this is one run. Write them as in optimizer.lr=1e-3,2e-3.")
    if only is not None and only >= len(planned.runs):
        raise LaunchError(
            f"--only {only}: the sweep has {plural(len(planned.runs), 'run')}. Use 0 to {len(planned.runs) - 1}."
        )
    options = () if nproc is None else ("--nproc", nproc)
    if slurm:
        given = [word if word.startswith("-") else f"--{word}" for word in sbatch or ()]  # time=2:00:00 was the form
        if (warning := accelerator_warning(planned, given, parse_nproc(nproc)[1])) is not None:
            complain(warning)
        _submit(planned, [*axes, *options], given, at_once, dry_run)
        return
    quiet = (lambda _: None) if as_json else say
    results = sweep_results(planned) if show else run_sweep(planned, quiet, only=only, train_options=options)
    _show(planned, results, as_json)
    failed = [result.exit_code for result in results if result.exit_code]
    raise typer.Exit(failed[-1] if failed else 0)


def _show(planned: "Sweep", results: "list[SweepResult]", as_json: bool) -> None:
    from hlat.reporting import write_report
    from hlat.sweep import ranked, sweep_json, sweep_lines

    if as_json:
        say(json.dumps(sweep_json(results), indent=2))
        return
    for line in sweep_lines(results):
        say(line)
    begun = [result.run.folder for result in ranked(results) if result.summary is not None]
    if begun:
        say(f"report: {write_report(begun, planned.folder / 'report.html')}")


def _submit(planned: "Sweep", words: list[str], given: list[str], at_once: int | None, dry_run: bool) -> None:
    from hlat.runtime.errors import LaunchError, StorageError
    from hlat.sweep import array_script

    script, folders = array_script(planned, words, given, at_once)
    if dry_run:
        say(script.rstrip())
        return
    try:
        for folder in (planned.folder, *folders):
            folder.mkdir(parents=True, exist_ok=True)
        file = planned.folder.absolute() / "sweep.sbatch"
        file.write_text(script, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{planned.folder}: the script cannot be written: {error.strerror or error}") from error
    try:
        done = subprocess.run(
            ["sbatch", str(file)], capture_output=True, text=True, errors="replace", check=False, timeout=60
        )
    except FileNotFoundError as error:
        raise LaunchError("there is no sbatch here: run this on a login node, or leave out --slurm.") from error
    if done.returncode:
        raise LaunchError(f"sbatch refuses {file}: {done.stderr.strip()}")
    say(done.stdout.strip())
    say(f"when it has ended: hlat sweep {planned.recipe} {' '.join(words)} --to {planned.folder} --list")
