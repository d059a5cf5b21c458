"""``hlat train``, ``hlat compile`` and ``hlat sweep``: a run of a recipe, its code compiled before, or many runs.

train    recipe -> supervisor -> one process or several, on one host or several;  a worker -> _work -> hlat.training
compile  recipe -> processes as those of the run -> the compilers' cache, an archive for other machines (--unpack)
sweep    recipe, values of some fields -> a run for every combination, here or as elements of a job array
"""

import json
import os
import signal
import subprocess
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hlat.cli.options import RANGE, DryRunOption, JsonOption, NodeOption, SbatchOption
from hlat.cli.terminal import (
    LOG_ENV,
    OpeningLine,
    OverridesArgument,
    QuietOption,
    RecipeArgument,
    VerboseOption,
    complain,
    complain_above,
    data_progress,
    opening_line,
    ready,
    say,
    say_above,
    show_event,
    show_notes,
)
from hlat.runtime.backend.c_library import finish_compiling
from hlat.runtime.errors import LaunchError, StorageError
from hlat.runtime.process import LAUNCHER_ENV, REQUEUE_CODE, rank_info, stop_exit_code
from hlat.runtime.progress import enter_stage
from hlat.runtime.terminal import be_verbose, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hlat.compilation import CompiledCache
    from hlat.config import Recipe
    from hlat.launch import CompileJob, TrainingJob, Voice
    from hlat.sweep import Sweep, SweepResult
    from hlat.training import Outcome


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command("compile")(compile_recipe)
    app.command()(train)
    app.command()(sweep)


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    nproc: Annotated[
        str | None,
        typer.Option(
            metavar=RANGE,
            help="Number of processes on this machine, such as one per accelerator; default: one. "
            "MIN:MAX begins with MAX and goes on with fewer where one is lost again and again.",
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar=RANGE,
            help="Number of hosts: the same command runs on each, with its own --node, and a run.dir that all share. "
            "MIN:MAX goes on without hosts that are lost, and takes them back.",
        ),
    ] = None,
    node: NodeOption = None,
    address: Annotated[
        str | None,
        typer.Option(help="Address of this host for the others, on which alone it listens; default: of its name."),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Write a trace of steps 4 to 6 and a table of their time to the run folder."),
    ] = False,
    allow_faults: Annotated[
        bool, typer.Option("--allow-faults", help="Inject the faults that the recipe lists, to rehearse recovery.")
    ] = False,
    no_supervisor: Annotated[
        bool,
        typer.Option("--no-supervisor", help="Run without automatic restarts (debuggers, external schedulers)."),
    ] = False,
    require_step: Annotated[
        int | None,
        typer.Option(min=0, help="Resume from this step; fail unless it is the newest checkpoint."),
    ] = None,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train. The same command again resumes an interrupted run."""
    if verbose:
        be_verbose()
    with opening_line(f"reading {recipe}", draws=not quiet) as line:
        from hlat.launch import TrainingJob, Voice, parse_nproc, refuse_worker

        # As overrides, so that all processes of the run get them with the recipe.
        console = ["tracking.console=json"] if os.environ.get(LOG_ENV) == "json" else []
        given = [*(overrides or ()), *(["tracking.console=warnings"] if quiet else console)]
        job = TrainingJob(recipe, tuple(given), profile, allow_faults, require_step)
        counts = parse_nproc(nproc)
        voice = Voice(complain_above, say_above, partial(_begin, line), show_event=show_event, show_start=line.show)
        if nodes is not None:
            from hlat.launch import HostOptions, supervise_on_hosts  # with what preflight checks need: 0.3 s

            refuse_worker(nproc or "")
            raise typer.Exit(supervise_on_hosts(job, counts[1], HostOptions(nodes, node, address), voice))
        if alone := [name for name, value in (("--node", node), ("--address", address)) if value is not None]:
            raise LaunchError(
                f"{' and '.join(alone)}: for a run on several hosts, whose number is not given. Add --nodes N on every "
                "host; without it each would be a run of its own."
            )
        raise typer.Exit(_train_here(job, nproc, counts, voice, line, once=no_supervisor, draws=not quiet))


def _train_here(
    job: "TrainingJob",
    nproc: str | None,
    counts: tuple[int, int],
    voice: "Voice",
    line: OpeningLine,
    *,
    once: bool,
    draws: bool,
) -> int:
    from hlat.launch import join_slurm_job, refuse_half_environment, refuse_worker, supervise_job

    join_slurm_job(nproc)
    refuse_half_environment()
    if counts[1] > 1:
        refuse_worker(nproc or "")
    elif once or "WORLD_SIZE" in os.environ:
        return _work(job, line)
    return supervise_job(job, counts, voice, lambda: _work(job, OpeningLine(draws=draws)), once=once)


def _begin(line: OpeningLine, recipe: "Recipe") -> None:
    from hlat.tracking import prepare_streams, shows_a_line

    # Only now it is known which console the recipe asks for.
    if shows_a_line(recipe.tracking):
        line.show("starting")
    else:
        line.end()
    prepare_streams(recipe.tracking)
    ready(hears_sigterm=True, works=True)


def _work(job: "TrainingJob", line: OpeningLine) -> int:
    from hlat.launch import worker_context

    with worker_context():
        line.show(f"reading {job.recipe}")  # a supervisor shows its own line until now
        from hlat.tracking import prepare_streams, show_stages, shows_progress

        here = rank_info()
        recipe = _checked(job, here.world)
        line.end()
        prepare_streams(recipe.tracking)
        with show_stages(recipe.tracking, say) if here.rank == 0 else nullcontext():
            enter_stage("importing PyTorch")
            from hlat.model import begin_compilation

            begin_compilation(recipe.run.device)  # beside the imports, which use one core
            from hlat.training import run  # noqa: F401 - the door itself imports nothing

            finish_compiling()
            # Only now: until here a signal ends the process at once.
            ready(hears_sigterm=True, works=True)
            shown = {"data_progress": data_progress} if shows_progress(recipe.tracking) else {}
            outcome = job.train_here(recipe, **shown)
    if here.rank == 0:
        say(summary(outcome))
    return exit_code(outcome)


def _checked(job: "TrainingJob", world: int) -> "Recipe":
    # A supervisor has checked the start; of several processes, each would be alone in it.
    if world > 1 or LAUNCHER_ENV in os.environ:
        return job.load(world)
    from hlat.launch import Here, load_and_check

    report = load_and_check(lambda: job.load_as_written(world), Here(1, 1, stores=False))
    for line in report.chosen:
        say(f"chosen: {line}")
    show_notes(report.before_training)
    return report.recipe


def summary(outcome: "Outcome") -> str:
    """Describe the end of the run in one or two lines."""
    if outcome.finished:
        text = f"finished at step {outcome.step}"
    else:
        text = f"stopped at step {outcome.step} of {outcome.total_steps} ({outcome.reason}); the same command goes on"
    if outcome.validation is not None:
        validation = outcome.validation
        text += f"; validation loss {validation.loss:.4f}, {validation.bits_per_byte:.4f} bits per byte"
    return f"{text}\ncheckpoint {outcome.checkpoint}" if outcome.checkpoint is not None else text


def exit_code(outcome: "Outcome") -> int:
    """Return 0 for a run that finished or reached stop_after, else the code of the signal or deadline."""
    if outcome.reason == "deadline":
        return REQUEUE_CODE
    return stop_exit_code(signal.Signals[outcome.reason]) if outcome.reason in signal.Signals.__members__ else 0


def compile_recipe(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes of the run on this machine, as for hlat train; default: one.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device type, as in neuron; default: run.device of the recipe.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Archive to write, for other machines like this one.")] = None,
    unpack: Annotated[Path | None, typer.Option(help="Fill the cache from this archive instead of compiling.")] = None,
) -> None:
    """Compile the code of a run before it starts, for training and validation, into the compilers' cache."""
    from hlat.launch import CompileJob, is_worker, join_slurm_job, refuse_worker

    job = CompileJob(recipe, (*(overrides or ()), *(() if device is None else (f"run.device={device}",))))
    if unpack is not None:
        if to is not None or nproc is not None:
            raise LaunchError("--unpack fills the cache from an archive: it takes neither --to nor --nproc.")
        ready(works=True)
        _say_cache(job.unpack(unpack), f"unpacked {unpack}")
        return
    join_slurm_job(nproc)
    if nproc is not None and nproc > 1:
        refuse_worker(nproc)
    elif is_worker():
        if to is not None:
            raise LaunchError("--to packs what the processes of one machine compile: use --nproc N, without torchrun.")
        _compile_here(job)
        return
    raise typer.Exit(_fill_cache(job, nproc or 1, to))


def _fill_cache(job: "CompileJob", nproc: int, out: Path | None) -> int:
    from hlat.launch import ProcessesFailed

    ready(works=True)
    try:
        filled = job.fill(nproc, out, work=_compile_here)
    except ProcessesFailed as failed:
        if failed.outcome.message:
            complain(failed.outcome.message)
        return failed.outcome.exit_code
    _say_cache(filled, "compiled")
    if out is not None:
        say(f"archive {out}; on other machines: hlat compile {job.recipe} --unpack {out.name}")
    return 0


def _compile_here(job: "CompileJob") -> None:
    from hlat.launch import worker_context

    with worker_context():
        from hlat.compilation import compile_graphs  # noqa: F401 - the door itself imports nothing

        # Only now: until here a signal ends the process at once.
        ready(hears_sigterm=True, works=True)
        job.compile_here()


def _say_cache(cache: "CompiledCache", what: str) -> None:
    processes = "process" if cache.world == 1 else f"each of {cache.world} processes"
    say(f"{what}: {plural(cache.files, 'file')}, {cache.size / 1e6:,.1f} MB, for {processes} on {cache.device_type}")
    for name, value in cache.versions.items():
        say(f"  {name}: {value or 'none'}")


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
    as_json: JsonOption = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit a job array, an element for each run.")] = False,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="With --slurm: runs at the same time; default: as many as Slurm starts.")
    ] = None,
    sbatch: SbatchOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Train a recipe with several values of some fields. The same command again goes on where it stopped."""
    from hlat.sweep import plan_sweep, run_sweep, sweep_results

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
        submit_array(planned, axes, nproc, sbatch, at_once, dry_run=dry_run)
        return
    quiet = (lambda _: None) if as_json else say
    results = sweep_results(planned) if show else run_sweep(planned, quiet, only=only, train_options=options)
    _show_sweep(planned, results, as_json)
    failed = [result.exit_code for result in results if result.exit_code]
    raise typer.Exit(failed[-1] if failed else 0)


def _show_sweep(planned: "Sweep", results: "list[SweepResult]", as_json: bool) -> None:
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


def submit_array(
    planned: "Sweep",
    words: "Sequence[str]",
    nproc: str | None,
    sbatch: "Sequence[str] | None",
    at_once: int | None,
    *,
    dry_run: bool,
    verb: str = "sweep",
) -> None:
    """Submit the runs of a verb as a job array of Slurm; a dry run prints its script."""
    from hlat.launch import parse_nproc
    from hlat.sweep import accelerator_warning, array_script

    words = [*words, *(() if nproc is None else ("--nproc", nproc))]
    given = [word if word.startswith("-") else f"--{word}" for word in sbatch or ()]  # time=2:00:00 was the form
    if (warning := accelerator_warning(planned, given, parse_nproc(nproc)[1])) is not None:
        complain(warning)
    script, folders = array_script(planned, words, given, at_once, verb)
    if dry_run:
        say(script.rstrip())
        return
    try:
        for folder in (planned.folder, *folders):
            folder.mkdir(parents=True, exist_ok=True)
        file = planned.folder.absolute() / f"{verb}.sbatch"
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
    say(f"when it has ended: hlat {verb} {planned.recipe} {' '.join(words)} --to {planned.folder} --list")
