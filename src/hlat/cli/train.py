"""``hlat train`` and ``hlat compile``: start or resume the run of a recipe, or compile its code before it starts.

train    recipe -> supervisor -> one process or several, on one host or several;  a worker -> _work -> hlat.training
compile  recipe -> processes as those of the run -> the compilers' cache, an archive for other machines (--from)
"""

import os
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
from hlat.runtime.errors import LaunchError
from hlat.runtime.process import LAUNCHER_ENV, REQUEUE_CODE, be_verbose, rank_info, stop_exit_code
from hlat.runtime.progress import enter_stage
from hlat.runtime.terminal import plural

if TYPE_CHECKING:
    from hlat.compilation import CompiledCache
    from hlat.config import Recipe
    from hlat.launch import CompileJob, TrainingJob
    from hlat.training import Outcome


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command("compile")(compile_recipe)
    app.command()(train)


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    nproc: Annotated[
        str | None,
        typer.Option(
            metavar="N or MIN:MAX",
            help="Number of processes on this machine, such as one per accelerator; default: one. "
            "MIN:MAX begins with MAX and goes on with fewer where one is lost again and again.",
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="N or MIN:MAX",
            help="Number of hosts: the same command runs on each, with its own --node, and a run.dir that all share. "
            "MIN:MAX goes on without hosts that are lost, and takes them back.",
        ),
    ] = None,
    node: Annotated[
        int | None,
        typer.Option(min=0, help="Number of this host, from 0; default: that of Slurm, Kubernetes or torchrun."),
    ] = None,
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
        from hlat.launch import (
            TrainingJob,
            Voice,
            join_slurm_job,
            parse_nproc,
            refuse_half_environment,
            refuse_worker,
            supervise_job,
        )

        # As overrides, so that all processes of the run get them with the recipe.
        console = ["tracking.console=json"] if os.environ.get(LOG_ENV) == "json" else []
        given = [*(overrides or ()), *(["tracking.console=warnings"] if quiet else console)]
        job = TrainingJob(recipe, tuple(given), profile, allow_faults, require_step)
        least, most = parse_nproc(nproc)
        voice = Voice(complain_above, say_above, partial(_begin, line), show_event=show_event, show_start=line.show)
        if nodes is not None:
            from hlat.launch import HostOptions, supervise_on_hosts  # with what preflight checks need: 0.3 s

            refuse_worker(nproc or "")
            raise typer.Exit(supervise_on_hosts(job, most, HostOptions(nodes, node, address), voice))
        if alone := [name for name, value in (("--node", node), ("--address", address)) if value is not None]:
            raise LaunchError(
                f"{' and '.join(alone)}: for a run on several hosts, whose number is not given. Add --nodes N on every "
                "host; without it each would be a run of its own."
            )
        join_slurm_job(nproc)
        refuse_half_environment()
        if most > 1:
            refuse_worker(nproc or "")
        elif no_supervisor or "WORLD_SIZE" in os.environ:
            raise typer.Exit(_work(job, line))
        raise typer.Exit(
            supervise_job(
                job, (least, most), voice, lambda: _work(job, OpeningLine(draws=not quiet)), once=no_supervisor
            )
        )


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
            import hlat.training  # noqa: F401

            finish_compiling()
            # Only now: an import that an exception interrupts may raise a different one.
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

    report = load_and_check(lambda: job.load(world), Here(1, 1, stores=False))
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
    out: Annotated[Path | None, typer.Option(help="Archive to write, for other machines like this one.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Fill the cache from this archive instead of compiling.")
    ] = None,
) -> None:
    """Compile the code of a run before it starts, for training and validation, into the compilers' cache."""
    from hlat.launch import CompileJob, is_worker, join_slurm_job, refuse_worker

    job = CompileJob(recipe, (*(overrides or ()), *(() if device is None else (f"run.device={device}",))))
    if source is not None:
        if out is not None or nproc is not None:
            raise LaunchError("--from fills the cache from an archive: it takes neither --out nor --nproc.")
        ready(works=True)
        _say_cache(job.unpack(source), f"unpacked {source}")
        return
    join_slurm_job(nproc)
    if nproc is not None and nproc > 1:
        refuse_worker(nproc)
    elif is_worker():
        if out is not None:
            raise LaunchError("--out packs what the processes of one machine compile: use --nproc N, without torchrun.")
        _compile_here(job)
        return
    raise typer.Exit(_fill_cache(job, nproc or 1, out))


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
        say(f"archive {out}; on other machines: hlat compile {job.recipe} --from {out.name}")
    return 0


def _compile_here(job: "CompileJob") -> None:
    from hlat.launch import worker_context

    with worker_context():
        import hlat.compilation  # noqa: F401

        # Only now: an import that an exception interrupts may raise a different one.
        ready(hears_sigterm=True, works=True)
        job.compile_here()


def _say_cache(cache: "CompiledCache", what: str) -> None:
    processes = "process" if cache.world == 1 else f"each of {cache.world} processes"
    say(f"{what}: {plural(cache.files, 'file')}, {cache.size / 1e6:,.1f} MB, for {processes} on {cache.device_type}")
    for name, value in cache.versions.items():
        say(f"  {name}: {value or 'none'}")
