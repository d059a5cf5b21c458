"""``hlat train``: start or resume the run of a recipe, in one process or several."""

import os
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hlat.cli.common import OverridesArgument, RecipeArgument, complain, data_progress, ready, say
from hlat.config import Recipe, RecipeError, load_recipe
from hlat.config.sections import refuse_faults
from hlat.runtime import LaunchError, rank_info, slurm
from hlat.runtime.process import REQUEUE_CODE, stop_exit_code
from hlat.runtime.storage import EarlierAttempt

if TYPE_CHECKING:
    from hlat.launch import ProcessSet
    from hlat.training import Outcome


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
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
) -> None:
    """Train. The same command again resumes an interrupted run."""
    _join_job(nproc)
    given = _Arguments(recipe, tuple(overrides or ()), profile, allow_faults, require_step)
    least, most = _numbers(nproc)
    if most > 1:
        _refuse_worker(nproc or "")
    elif no_supervisor or "WORLD_SIZE" in os.environ:
        raise typer.Exit(given.work())
    raise typer.Exit(_supervise(given, least, most, once=no_supervisor))


@dataclass(frozen=True)
class _Arguments:
    """Arguments of ``hlat train``, passed on to the process that trains."""

    recipe: str
    overrides: tuple[str, ...]
    profile: bool
    allow_faults: bool
    require_step: int | None

    def load(self, world: int) -> Recipe:
        recipe = load_recipe(self.recipe, list(self.overrides), world=world)
        refuse_faults(recipe.faults, self.allow_faults)
        return recipe

    def words(self) -> list[str]:
        options = [*(["--profile"] if self.profile else []), *(["--allow-faults"] if self.allow_faults else [])]
        if self.require_step is not None:
            options += ["--require-step", str(self.require_step)]
        return ["train", self.recipe, *self.overrides, *options]

    def work(self) -> int:
        """Train in this process; return the exit code."""
        from hlat.launch import worker_context

        with worker_context():
            from hlat.training import run

            ready()  # only now: an import that an exception interrupts may raise a different one
            here = rank_info()
            recipe = self.load(here.world)
            earlier = EarlierAttempt.read()
            outcome = run(
                recipe,
                data_progress=data_progress,
                profile=self.profile,
                allow_faults=self.allow_faults,
                require_step=None if earlier is not None else self.require_step,
                earlier=earlier,
            )
        if here.rank == 0:
            say(summary(outcome))
        return exit_code(outcome)

    def start(self, nproc: int, environment: Mapping[str, str], folder: Path) -> "AbstractContextManager[ProcessSet]":
        """Start the processes of one attempt."""
        if nproc == 1:
            from hlat.launch import launch_forked

            return launch_forked(self.work, environment, folder)
        from hlat.launch import hlat_command, launch_multiprocess

        return launch_multiprocess(hlat_command(self.words()), nproc, environment, folder)


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
    """Exit code of a run: 0 if it finished or reached stop_after, else that of the signal or deadline."""
    if outcome.reason == "deadline":
        return REQUEUE_CODE
    return stop_exit_code(signal.Signals[outcome.reason]) if outcome.reason in signal.Signals.__members__ else 0


def _numbers(nproc: str | None) -> tuple[int, int]:
    """Parse --nproc into the smallest and largest number of processes."""
    low, colon, high = (nproc or "1").partition(":")
    least, most = (int(part) if part.isascii() and part.isdigit() else 0 for part in (low, high if colon else low))
    if not 1 <= least <= most:
        raise LaunchError(f"--nproc {nproc}: expected a number of processes, 1 or more, or a range as in 2:8.")
    return least, most


def _refuse_worker(nproc: str) -> None:
    set_already = [f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if set_already:
        message = (
            f"--nproc {nproc} starts the processes of a run, but this is one already: {', '.join(set_already)} is set."
        )
        raise LaunchError(f"{message} Under torchrun leave --nproc out; otherwise unset RANK and WORLD_SIZE.")


def _join_job(nproc: str | None) -> None:
    """Take rank and world size from Slurm if this process is one of several tasks of srun."""
    if nproc is None:
        os.environ.update(slurm.rank_variables())
    elif slurm.in_step() and "WORLD_SIZE" not in os.environ and (slurm.task_count() or 1) > 1:
        message = (
            f"--nproc {nproc} starts the processes of a run, but srun has started {slurm.task_count()} tasks already."
        )
        raise LaunchError(
            f"{message} Leave --nproc out, and every task is a process of one run; or start one task, `srun -n 1`."
        )


def _supervise(given: _Arguments, least: int, most: int, *, once: bool) -> int:
    recipe = given.load(most)  # reports errors before any process starts
    from hlat.launch import SupervisedRun, check_extensions, supervise
    from hlat.resilience import WorldSizePolicy

    ready()
    check_extensions(recipe)
    recovery = recipe.recovery
    if once:
        recovery = recovery.model_copy(update={"restarts": 0, "hang_seconds": None})
    sizes = WorldSizePolicy(least, most, lambda nproc: _fits(given, nproc))
    return supervise(SupervisedRun(given.start, sizes, recipe.run_dir, recovery, complain, say))


def _fits(given: _Arguments, nproc: int) -> bool:
    try:
        given.load(nproc)
    except RecipeError:
        return False
    return True
