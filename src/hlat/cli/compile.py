"""``hlat compile``: fill the cache of compiled code before a run starts, and pack it for other machines."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hlat.cli.common import OverridesArgument, RecipeArgument, complain, ready, say
from hlat.runtime.errors import LaunchError
from hlat.runtime.terminal_text import plural

if TYPE_CHECKING:
    from hlat.compilation import CompiledCache
    from hlat.launch import CompileJob


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command("compile")(compile_recipe)


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
        _report(job.unpack(source), f"unpacked {source}")
        return
    join_slurm_job(nproc)
    if nproc is not None and nproc > 1:
        refuse_worker(nproc)
    elif is_worker():
        if out is not None:
            raise LaunchError("--out packs what the processes of one machine compile: use --nproc N, without torchrun.")
        _work(job)
        return
    raise typer.Exit(_fill(job, nproc or 1, out))


def _fill(job: "CompileJob", nproc: int, out: Path | None) -> int:
    from hlat.launch import ProcessesFailed

    ready(works=True)
    try:
        filled = job.fill(nproc, out, work=_work)
    except ProcessesFailed as failed:
        if failed.outcome.message:
            complain(failed.outcome.message)
        return failed.outcome.exit_code
    _report(filled, "compiled")
    if out is not None:
        say(f"archive {out}; on other machines: hlat compile {job.recipe} --from {out.name}")
    return 0


def _work(job: "CompileJob") -> None:
    """Compile in this process."""
    from hlat.launch import worker_context

    with worker_context():
        import hlat.compilation  # noqa: F401

        # Only now: an import that an exception interrupts may raise a different one.
        ready(hears_sigterm=True, works=True)
        job.compile_here()


def _report(cache: "CompiledCache", what: str) -> None:
    processes = "process" if cache.world == 1 else f"each of {cache.world} processes"
    say(f"{what}: {plural(cache.files, 'file')}, {cache.size / 1e6:,.1f} MB, for {processes} on {cache.device_type}")
    for name, value in cache.versions.items():
        say(f"  {name}: {value or 'none'}")
