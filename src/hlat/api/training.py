"""Training, rehearsal and compilation of recipes, in this process or in others.

    train          recipe -> this process, or supervised ones on this host or several -> TrainingResult
    rehearse       recipe -> a step of some ranks, on tensors that take no memory -> Rehearsal
    compile_cache  recipe -> processes as those of the run -> cache of this machine, archive
    unpack_cache   archive -> cache of this machine

What computing changes in this process is put back at the end (``restored``). A failure of another process is an error
of its class here (``outcome_error``).
"""

import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.api.recipes import Overrides, checks_arguments, recipe_job, refuse_objects, with_own_parts
from hlat.api.records import metrics
from hlat.config import Recipe
from hlat.launch import (
    CompileJob,
    HostOptions,
    ProcessesFailed,
    RunOutcome,
    TrainingJob,
    Voice,
    parse_nproc,
    refuse_worker,
    supervise_job,
    supervise_on_hosts,
)
from hlat.runtime.errors import HlatError, LaunchError, PlanError, error_class

if TYPE_CHECKING:
    from hlat.compilation import CompiledCache
    from hlat.rehearsal import RankReport, Rehearsal
    from hlat.training import StepEnd, TrainingComponent


@contextmanager
def restored() -> Iterator[None]:
    """Put back settings of the process and its random generators at the end of the block."""
    python_state = random.getstate()  # first: modules that are imported now may draw a number
    from hlat.runtime.backend.device import restored_settings
    from hlat.runtime.randomness import rng_state, set_rng_state

    state = rng_state()
    try:
        with restored_settings():
            yield
    finally:
        set_rng_state(state)
        random.setstate(python_state)


def outcome_error(outcome: RunOutcome) -> HlatError:
    """Make the error of a run in other processes: of the class that ended its first failing process."""
    report = outcome.cause.report if outcome.cause is not None else None
    kind = error_class(report.error if report is not None else "", outcome.exit_code)
    return kind(outcome.message)


_LOG = logging.getLogger("hlat")
_FAILURES = range(1, 64)  # exit codes of errors; those of stops are 75, or 128 and the number of the signal


@dataclass(frozen=True)
class TrainingResult:
    """Result of ``train``.

    Attributes:
        step: optimizer steps done.
        total_steps: optimizer steps of the recipe.
        reason: why training ended: "finished", "stop_after", "deadline", or the name of a signal, such as "SIGINT".
        loss: training loss of the last logged step, nats per token; None if no step was logged.
        validation_loss: validation loss of the last step, nats per token; None if that step did not validate.
        validation_bits_per_byte: the same in bits per byte of text.
        checkpoint: the newest checkpoint; None if training was stopped before its first step.
        run_dir: folder of the run.
    """

    step: int
    total_steps: int
    reason: str
    loss: float | None
    validation_loss: float | None
    validation_bits_per_byte: float | None
    checkpoint: Path | None
    run_dir: Path

    @property
    def finished(self) -> bool:
        """True if all steps of the recipe are done."""
        return self.step >= self.total_steps


@checks_arguments
def train(
    recipe: Recipe | str | Path,
    overrides: Overrides = (),
    *,
    nproc: int | str = 1,
    nodes: int | str | None = None,
    node: int | None = None,
    address: str | None = None,
    profile: bool = False,
    allow_faults: bool = False,
    require_step: int | None = None,
    optimizer: Callable[..., Any] | None = None,
    components: "Sequence[type[TrainingComponent] | TrainingComponent]" = (),
    on_step: "Callable[[StepEnd], object] | None" = None,
    quiet: bool = False,
) -> TrainingResult:
    """Train a recipe, or resume its run: the newest valid checkpoint in its folder is loaded.

    Ctrl-C (SIGINT) and SIGTERM, SIGHUP and SIGUSR1 stop after the present step, save a checkpoint and return, with the
    name of the signal as ``reason``; a second Ctrl-C raises KeyboardInterrupt at once. Python delivers signals to the
    main thread only: called from another thread, ``train`` does not stop on them.

    Args:
        recipe: a recipe, a recipe file, or the name of a shipped recipe.
        overrides: changes of the recipe, if it is a file or a name.
        nproc: 1 trains in this process, without restarts after failures. A larger number starts that many processes
            on this machine, supervised as by ``hlat train --nproc``; "MIN:MAX" goes on with fewer if one is lost.
        nodes: number of hosts, on each of which the same call is made; "MIN:MAX" goes on without lost hosts. None for
            this machine alone.
        node: number of this host, from 0; None for that of Slurm, Kubernetes or torchrun.
        address: address of this host for the others; None for that of its name.
        profile: write a trace of steps 4 to 6 and a table of their time to the run's folder.
        allow_faults: inject the faults that the recipe lists; without it such a recipe is refused.
        require_step: resume from this step; fail unless it is the newest checkpoint.
        optimizer: a class of your own in place of ``optimizer.kind``: a torch.optim.Optimizer or an OptimizerSpec, or
            a functools.partial of it with options. Like ``components`` and ``on_step``, for one process.
        components: training components of your own, classes or objects, besides those of the recipe.
        on_step: called after each step with its ``step``, ``result`` (loss, gradient norm, learning rate) and
            ``is_last``.
        quiet: show no line of progress; without it there is one on a terminal and in a notebook.

    Raises:
        RecipeError: the recipe has problems, or does not fit the number of processes.
        LaunchError: objects of this process are given, and the run has several.
        HlatError: the run cannot start or continue; the subclass and the message say why and what would work.
    """
    least, most = parse_nproc(nproc)
    if optimizer is not None or components:
        recipe, overrides = with_own_parts(recipe, overrides, optimizer, components), ()
    if nodes is not None or most > 1:
        refuse_objects(optimizer, components, on_step)
    with recipe_job(recipe, overrides, profile, allow_faults, require_step) as job:
        if nodes is not None or most > 1:
            # A process of torchrun or Slurm that started others would start too many.
            refuse_worker(nproc)
            hosts = None if nodes is None else HostOptions(nodes, node, address)
            return _train_supervised(job, least, most, hosts)
        return _train_here(job, () if on_step is None else (on_step,), quiet)


@checks_arguments
def rehearse(
    recipe: Recipe | str | Path,
    overrides: Overrides = (),
    *,
    world: int | None = None,
    ranks: Sequence[int] | None = None,
    processes: int = 1,
    on_report: "Callable[[RankReport], None] | None" = None,
    device: str | None = None,
    cluster: str | None = None,
    hardware: str | Path | None = None,
    stage: str | None = None,
) -> "Rehearsal":
    """Run a training step of some ranks on this machine, on tensors that take no memory.

    Args:
        recipe: a recipe, a recipe file, or the name of a shipped recipe.
        overrides: changes of the recipe, if it is a file or a name.
        world: world size of the run: one process per accelerator; None for the devices of the cluster, else 1.
        ranks: ranks to rehearse; None for those that a plan reports: of the first two pipeline ranks, of the last, and
            of the one that needs most memory.
        processes: processes of this machine to use. More than 1 start new interpreters, which import the program's
            main module: a script then needs ``if __name__ == "__main__":``.
        on_report: called with the report of each rank as soon as there is one.
        device: device whose decisions are taken, as in "neuron" or "cuda:h100"; None for that of the cluster.
        cluster: INSTANCE:N, as in "trn2.48xlarge:1", whose chip is simulated, whose memory the ranks are compared
            with, and which the time of the step is predicted for. Without ``device`` and ``cluster``, the rehearsal
            decides as on a CPU.
        hardware: file with a catalog of chips and instances, on top of the one that ships with hlat.
        stage: name of the stage to rehearse, of a recipe with stages, which needs it.

    Returns:
        ``ranks``: a report for each, with ``peak_bytes``, ``messages``, ``flops`` and others; ``layout``; ``decisions``
        of the simulated device; ``verdict`` with ``fits`` and ``remedies``, of a device or cluster; ``plan`` and
        ``timelines``, the step in time, of a cluster with as many devices as the run has processes; ``chrome_trace()``;
        and ``to_dict()`` with everything as JSON values.

    Raises:
        RecipeError: every problem of the recipe, also those that only a rank finds.
        LaunchError: there is no such rank, no stage is named of a recipe with stages, or everything that the device
            cannot do.
        HardwareError: no such device, chip or cluster, or the catalog is inconsistent.
    """
    with restored(), recipe_job(recipe, overrides) as job:
        from hlat.hardware import load_catalog, parse_cluster
        from hlat.planner import machines_with
        from hlat.rehearsal import parse_device
        from hlat.rehearsal import rehearse as rehearse_world

        catalog = load_catalog(hardware)
        of_cluster = None if cluster is None else parse_cluster(cluster, catalog)
        simulated = parse_device(device, of_cluster, catalog)
        count, like = world or (1 if of_cluster is None else of_cluster.devices), of_cluster
        # What the recipe leaves open is chosen for the devices that it is rehearsed for.
        if like is None and simulated is not None:
            with suppress(PlanError):  # a chip that is not planned for
                like = machines_with(simulated.chip, count)
        resolved = job.load(count, like)
        if stage is None and resolved.stages:
            names = ", ".join(one.name for one in resolved.stages)
            raise LaunchError(f"a stage is rehearsed at a time: give one of {names} as stage.")
        return rehearse_world(
            resolved if stage is None else resolved.stage(stage),
            count,
            ranks,
            processes=processes,
            on_report=on_report or (lambda report: None),
            device=simulated,
            cluster=of_cluster,
        )


def _train_here(job: TrainingJob, on_step: "Sequence[Callable[[StepEnd], object]]", quiet: bool) -> TrainingResult:
    from hlat.runtime.process import rank_info
    from hlat.tracking import LogStream, StepLine, show_data_progress

    shown: dict[str, Any] = {}
    with restored(), LogStream(_LOG) as stream:
        here = rank_info()
        recipe = job.load(here.world)
        if not quiet and here.rank == 0 and StepLine.can_be_seen(sys.stdout):
            line = StepLine(sys.stdout, recipe.total_steps)
            on_step = (*on_step, lambda end: line.show(end.step, lambda: end.loss, end.is_last))
            # Of a large corpus the first step comes after hours.
            shown["data_progress"] = partial(show_data_progress, sys.stdout, print)
        outcome = job.train_here(recipe, stream=stream, on_step=on_step, **shown)
        return _result(recipe, outcome.step, outcome.reason, outcome.checkpoint)


@restored()
def _train_supervised(job: TrainingJob, least: int, most: int, hosts: HostOptions | None) -> TrainingResult:
    failures: list[RunOutcome] = []
    voice = Voice(complain=_LOG.warning, say=_LOG.info, failed=failures.append, show=_LOG.info)
    recipe = job.load_as_written(most if hosts is None else most * hosts.resolve(most)[1])
    code = supervise_job(job, (least, most), voice) if hosts is None else supervise_on_hosts(job, most, hosts, voice)
    if failures:
        raise outcome_error(failures[-1])
    if code in _FAILURES:  # the leader of the hosts has the message
        raise error_class("", code)(f"the run failed with exit code {code}: see {recipe.run_dir / 'events.jsonl'}.")
    from hlat.checkpoint import step_folder_name
    from hlat.tracking import read_valid_records

    events, _ = read_valid_records(recipe.run_dir / "events.jsonl")
    # The run's own record: its processes are gone.
    ends = [event for event in events if event.get("event") == "end"]
    if not ends:
        raise LaunchError("the run was stopped before its first step. The same call begins again.")
    step = int(ends[-1]["step"])
    folder = recipe.run_dir / "checkpoints" / step_folder_name(step)
    return _result(recipe, step, str(ends[-1]["reason"]), folder if folder.is_dir() else None)


def _result(recipe: Recipe, step: int, reason: str, checkpoint: Path | None) -> TrainingResult:
    rows: list[dict[str, Any]] = []
    if (recipe.run_dir / "metrics.jsonl").is_file():
        rows = metrics(recipe.run_dir).to_pylist()
    # The last line may be of an earlier step than the last one, which then did not validate.
    last = rows[-1] if rows else {}
    validated = last if last.get("step") == step else {}
    return TrainingResult(
        step,
        recipe.total_steps,
        reason,
        last.get("loss"),
        validated.get("val_loss"),
        validated.get("val_bits_per_byte"),
        checkpoint,
        recipe.run_dir,
    )


@checks_arguments
def compile_cache(
    recipe: Recipe | str | Path, overrides: Overrides = (), *, nproc: int = 1, out: str | Path | None = None
) -> "CompiledCache":
    """Compile the code of a run before it starts, in processes of their own, and fill the cache of this machine.

    Args:
        recipe: a recipe, a recipe file, or the name of a shipped recipe.
        overrides: changes of the recipe, if it is a file or a name.
        nproc: processes of the run on this machine.
        out: archive to write, for other machines like this one; None for none.

    Returns:
        ``files``, ``size`` in bytes, ``versions`` that the code depends on, ``device_type``, ``world``, ``archive``.

    Raises:
        RecipeError: the recipe has problems, or does not fit the number of processes.
        LaunchError: the run compiles nothing, or cannot run here.
        StorageError: the cache or the archive cannot be written.
    """
    refuse_worker(nproc)
    with restored(), recipe_job(recipe, overrides) as job:
        if nproc == 1:  # as in ``train``, which computes in this process
            import torch

            os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
        try:
            return CompileJob(job.recipe, job.overrides).fill(nproc, _path(out), show=_LOG.info)
        except ProcessesFailed as failed:
            raise outcome_error(failed.outcome) from failed


@checks_arguments
def unpack_cache(recipe: Recipe | str | Path, archive: str | Path, overrides: Overrides = ()) -> "CompiledCache":
    """Fill the cache of this machine from an archive of ``compile_cache``.

    The whole archive is checked before any file is placed. Compilers load code from their cache: unpack only archives
    of people whose programs you would run.

    Args:
        recipe: as for ``compile_cache``; it names the device and the folder of the cache.
        archive: the archive.
        overrides: as for ``compile_cache``.

    Raises:
        RecipeError: the recipe has problems.
        LaunchError: the archive is damaged, or for other devices or versions of compilers.
        StorageError: it cannot be read, or the cache cannot be written.
    """
    with restored(), recipe_job(recipe, overrides) as job:
        return CompileJob(job.recipe, job.overrides).unpack(Path(archive))


def _path(name: str | Path | None) -> Path | None:
    return None if name is None else Path(name)
