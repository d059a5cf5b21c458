"""A training job: a recipe and options, run in this process or in processes that this one supervises.

    TrainingJob --train_here--> hlat.training.run in this process --> Outcome
                --supervise---> processes, restarted after failures --> exit code
                                    each of them is the command ``hlat train`` with the same options

``hlat train`` and ``hlat.train`` both are this.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hlat.config import Recipe, RecipeError, find_recipe, refuse_faults
from hlat.hardware import Cluster
from hlat.launch.local_processes import ProcessSet, hlat_command, launch_forked, launch_multiprocess
from hlat.launch.metrics_process import metrics_server
from hlat.launch.start_examination import check_extensions, load_and_check
from hlat.launch.start_place import Here
from hlat.launch.supervision.local_run import supervise
from hlat.launch.supervision.self_watch import watching_itself
from hlat.launch.supervision.supervisor import Supervision, Voice
from hlat.planner import load_run_recipe, resolve_defaults
from hlat.resilience import WorldSizePolicy
from hlat.runtime import slurm
from hlat.runtime.errors import LaunchError
from hlat.runtime.logs import json_line, prints_json
from hlat.runtime.storage.run_folder import EarlierAttempt

if TYPE_CHECKING:
    from hlat.training import Outcome


def _print_line(stream: TextIO | None, text: str) -> None:
    print(json_line("message", text) if prints_json() else text, file=stream, flush=True)


@dataclass(frozen=True)
class TrainingJob:
    """A recipe to train, and the options of ``hlat train``."""

    recipe: str  # recipe file, or the name of a shipped recipe
    overrides: tuple[str, ...] = ()  # a.b=c each
    profile: bool = False  # write a trace of steps 4 to 6 and a table of their time
    allow_faults: bool = False  # inject the faults that the recipe lists
    require_step: int | None = None  # resume from this step; fail unless it is the newest checkpoint

    def load(self, world: int, on: Cluster | None = None) -> Recipe:
        """Load the recipe for ``world`` processes, here or on other machines; RecipeError lists every problem."""
        return resolve_defaults(self.load_as_written(world), world, on)[0]

    def load_as_written(self, world: int) -> Recipe:
        """Load the recipe without choosing what it leaves open, for which torch may be imported."""
        recipe = load_run_recipe(self.recipe, self.overrides, world=world)
        refuse_faults(recipe.faults, self.allow_faults)
        return recipe

    def arguments(self) -> list[str]:
        """Arguments of the command that trains this job as one process of a run."""
        options = [*(["--profile"] if self.profile else []), *(["--allow-faults"] if self.allow_faults else [])]
        if self.require_step is not None:
            options += ["--require-step", str(self.require_step)]
        return ["train", self.recipe, *self.overrides, *options]

    def train_here(self, recipe: Recipe, **options: Any) -> "Outcome":
        """Train in this process, one of the run's; options are ``stream`` and ``data_progress`` of ``training.run``."""
        from hlat.training import RunOrigin, run  # noqa: PLC0415  (a supervisor does not import torch)

        earlier = EarlierAttempt.read()
        with watching_itself(recipe, partial(_print_line, options.get("stream"))):
            return run(
                recipe,
                profile=self.profile,
                allow_faults=self.allow_faults,
                # After a restart, the newest checkpoint is one that this command has written.
                require_step=None if earlier is not None else self.require_step,
                earlier=earlier,
                origin=RunOrigin(self.recipe, self._text(), self.overrides),
                **options,
            )

    def _text(self) -> str:
        with suppress(OSError, ValueError, RecipeError):  # it was there when it was loaded
            return find_recipe(self.recipe).read_text(encoding="utf-8")
        return ""


def supervise_job(
    job: TrainingJob,
    nproc: tuple[int, int],
    voice: Voice,
    work: Callable[[], int] | None = None,
    *,
    once: bool = False,
) -> int:
    """Train a job in processes of this machine, restarted after failures as its recipe says; return the exit code.

    Args:
        job: the job.
        nproc: smallest number of processes to go on with, and number to begin with.
        voice: where messages go.
        work: the work of a single process, which is then forked; only for a process that has not imported torch.
        once: never restart, and detect no hangs.

    Raises:
        RecipeError: with every problem of the recipe, its files and this machine, or of another package's component.
        LaunchError: the package of a tracker is not installed, or metrics cannot be served at the recipe's address.
    """
    least, most = nproc

    def start(count: int, environment: Mapping[str, str], folder: Path) -> AbstractContextManager[ProcessSet]:
        if count == 1 and work is not None:
            return launch_forked(work, environment, folder)
        return launch_multiprocess(hlat_command(job.arguments()), count, environment, folder, voice.show)

    changes = {"restarts": 0, "hang_seconds": None} if once else {}
    with accepted_run(job, most, most, voice) as (_, accepted):
        run = replace(accepted, recovery=accepted.recovery.model_copy(update=changes))
        return supervise(run, start, WorldSizePolicy(least, most, partial(fits, job)))


@contextmanager
def accepted_run(
    job: TrainingJob, nproc: int, world: int, voice: Voice, *, all_notes: bool = False
) -> Iterator[tuple[Recipe, Supervision]]:
    """Load and check a job's recipe before any process starts; yield it, and settings while metrics can be served."""
    report = load_and_check(partial(job.load_as_written, world), Here(nproc, world, stores=False), forked=True)
    recipe = report.recipe
    voice.accepted(recipe)
    for line in report.chosen:
        voice.say(f"chosen: {line}")
    for note in report.notes if all_notes else report.before_training:
        tell = voice.complain if note.kind == "warning" else voice.say
        tell(f"{note.kind}: {note}")
    check_extensions(recipe, world)
    with metrics_server(recipe, voice.say) as observe:
        yield recipe, Supervision(recipe.run_dir, recipe.recovery, voice, observe)


def fits(job: TrainingJob, nproc: int) -> bool:
    """Return True if the job's recipe has a layout for this number of processes."""
    with suppress(RecipeError):
        job.load_as_written(nproc)
        return True
    return False


def parse_nproc(nproc: str | int | None) -> tuple[int, int]:
    """Parse a number of processes or a range MIN:MAX into smallest and largest; LaunchError if it is neither."""
    return parse_range("--nproc", "1" if nproc is None else str(nproc), "processes", "2:8")


def parse_range(option: str, text: str, what: str, example: str) -> tuple[int, int]:
    """Parse N or MIN:MAX, the value of an option that counts ``what``, into smallest and largest; or LaunchError."""
    low, colon, high = text.partition(":")
    # isdigit: int() takes signs and spaces too
    least, most = (int(part) if part.isascii() and part.isdigit() else 0 for part in (low, high if colon else low))
    if not 1 <= least <= most:
        raise LaunchError(f"{option} {text}: expected a number of {what}, 1 or more, or a range as in {example}.")
    return least, most


def refuse_worker(nproc: str | int) -> None:
    """Raise LaunchError if this process is itself one of several of a run, and would start others."""
    set_already = [f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if set_already:
        message = (
            f"--nproc {nproc} starts the processes of a run, but this is one already: {', '.join(set_already)} is set."
        )
        raise LaunchError(f"{message} Under torchrun leave --nproc out; otherwise unset RANK and WORLD_SIZE.")


def refuse_half_environment() -> None:
    """Raise LaunchError if a variable says that this is one of several processes and none says of how many."""
    # Such a process would train alone, and so would each of the others.
    if "WORLD_SIZE" not in os.environ and (rank := os.environ.get("RANK", "0")) not in ("", "0"):
        raise LaunchError(
            f"RANK={rank} is set, and WORLD_SIZE is not: this would be a run of its own, as would each other process. "
            "Start the processes with `hlat train --nproc N` or torchrun, which set both, or unset RANK."
        )


def join_slurm_job(nproc: str | int | None) -> None:
    """Take rank and world size from Slurm in one of several srun tasks; LaunchError if ``nproc`` is given too."""
    if nproc is None:
        os.environ.update(slurm.rank_variables())
    elif slurm.in_step() and "WORLD_SIZE" not in os.environ and (slurm.task_count() or 1) > 1:
        message = (
            f"--nproc {nproc} starts the processes of a run, but srun has started {slurm.task_count()} tasks already."
        )
        raise LaunchError(
            f"{message} Leave --nproc out, and every task is a process of one run; or start one task, `srun -n 1`."
        )
