"""Train the runs of a ladder, and read what they have reached.

sizes one after the other, in each the shortest run first:
finished -> left alone; any other -> hlat train RECIPE overrides, which resumes it too
goes on from a shorter one -> fork_run before
a run that fails ends the longer ones of its trunk, and not the others

folders --read_results--> RungResult of each --Ladder of the finished ones--> ladder.json
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from hlat.checkpoint import fork_run
from hlat.draft import time_text
from hlat.forecast import Ladder, LadderRun, read_ladder, sizes_of, write_ladder
from hlat.ladder.planned_runs import PlannedRun, places
from hlat.ladder.record import LadderPlan, changed, loss_settings
from hlat.reporting import RunRecord, active_seconds, is_run, read_run
from hlat.runtime.errors import CheckpointError, DataError, NumericsError, PlanError, StorageError
from hlat.runtime.storage.run_folder import RECIPE_NAME
from hlat.runtime.terminal import NAMED, listed
from hlat.sweep import Sweep, SweepRun, run_hlat
from hlat.training import check_fork_stages

Say = Callable[[str], None]
NOT_FINITE = "nan"
"""State of a run whose last loss is not finite: it counts as one that has not finished."""


@dataclass(frozen=True)
class RungResult:
    """A run of a ladder as it stands."""

    run: PlannedRun
    state: str
    curve: tuple[tuple[int, float], ...] = ()  # validations: step, loss; those of the trunk before it included
    seconds: float | None = None  # that its processes ran; None if it has not begun
    exit_code: int | None = None  # None if it was not started this time
    scores: Mapping[str, float] = field(default_factory=dict)  # of tasks at its end: TASK/acc, TASK/bits_per_byte

    @property
    def loss(self) -> float | None:
        """Validation loss at its end; None before."""
        return self.curve[-1][1] if self.curve and self.curve[-1][0] >= self.run.steps else None


def run_ladder(plan: LadderPlan, say: Say, *, only: int | None = None, options: Sequence[str] = ()) -> list[RungResult]:
    """Train the runs that are not finished, record the ladder, and return every run as it stands then.

    Args:
        plan: the runs.
        say: shows a message to the user.
        only: number of the size to train, from 0; None trains all.
        options: options of ``hlat train``, such as ("--nproc", "2").

    Raises:
        PlanError: a folder has a run with other settings.
        DataError: a line of a run's records is damaged.
    """
    read_results(plan)  # before the first step, a folder with another run is refused
    codes = dict[str, int]()
    for number, runs in enumerate(plan.by_size()):
        if only in (None, number) and not _train_size(plan, runs, say, options, codes):
            break
    results = read_results(plan, codes)
    record_results(plan, results)
    return results


def _train_size(
    plan: LadderPlan, runs: Sequence[PlannedRun], say: Say, options: Sequence[str], codes: dict[str, int]
) -> bool:
    """Train the runs of a size; return False if a signal came."""
    for run in runs:
        head = f"run {plan.runs.index(run) + 1} of {len(plan.runs)}, {run.name}"
        if (before := _result(plan, run)).loss is not None:
            say(f"{head}: loss {before.loss:.4f}, finished before")
            continue
        if before.state == NOT_FINITE:
            say(f"{head}: loss nan, finished before, and not counted")
            continue
        if run.parent is not None:
            if codes.get(run.parent):
                codes[run.name] = codes[run.parent]
                say(f"{head}: not started: it continues {run.parent}, which failed")
                continue
            try:
                _fork(plan, run)
            except (CheckpointError, StorageError) as error:
                codes[run.name] = error.exit_code
                say(f"{head}: cannot go on from {run.parent}: {error}")
                continue
        expected = "" if run.seconds is None else f", about {time_text(run.seconds)}"
        say(f"{head}: {run.steps:,} steps{f' from step {run.first:,} of {run.parent}' if run.parent else ''}{expected}")
        # A fork has them too, and not its own recipe.yaml: other words, as for memory, hold for what is not begun.
        words = ["train", "--quiet", *options, plan.target.source, *plan.words_of(run)]
        codes[run.name], interrupted = run_hlat(words, silent=True)
        if interrupted:
            return False
        after = _result(plan, run)
        if after.loss is not None:
            say(f"{head}: loss {after.loss:.4f} after {time_text(after.seconds or 0.0)}")
        elif codes[run.name]:
            say(f"{head}: failed with exit code {codes[run.name]}")
        else:
            codes[run.name] = NumericsError.exit_code if after.state == NOT_FINITE else DataError.exit_code
            events = plan.folder_of(run) / "events.jsonl"
            ended = "with the loss nan" if after.state == NOT_FINITE else "without a final validation loss"
            say(f"{head}: ended {ended}; see {events}")
    return True


def _fork(plan: LadderPlan, run: PlannedRun) -> None:
    """Fork a run from the one before it, unless that has been done."""
    folder = plan.folder_of(run)
    if not (folder / RECIPE_NAME).exists():
        words = (*run.overrides, *places(plan.target, plan.folder, run.name))
        fork_run(f"{plan.folder / str(run.parent)}@{run.first}", folder, words, check=check_fork_stages)


def array_of_sizes(plan: LadderPlan) -> Sweep:
    """Return the ladder as ``array_script`` takes it, a run for each size: its runs need each other's checkpoints."""
    firsts = [runs[0] for runs in plan.by_size()]
    device = plan.target.recipe.run.device
    runs = (SweepRun(run.name, {}, run.overrides, plan.folder_of(run), run.steps, device) for run in firsts)
    return Sweep(plan.target.source, plan.folder, tuple(runs))


def read_results(plan: LadderPlan, codes: Mapping[str, int] | None = None) -> list[RungResult]:
    """Read the state of every run from its folder; ``codes`` are exit codes of processes by run."""
    return [_result(plan, run, (codes or {}).get(run.name)) for run in plan.runs]


def record_results(plan: LadderPlan, results: Sequence[RungResult]) -> None:
    """Write the ladder of the finished runs into the folder, unless there are none, or it is there; StorageError."""
    finished = ladder_of(plan, results)
    with suppress(PlanError):
        if finished == read_ladder(plan.folder):
            return  # the folder may be one that can only be read
    if finished is not None:
        try:
            write_ladder(plan.folder, finished)
        except OSError as error:
            raise StorageError(f"{plan.folder}: the ladder cannot be recorded: {error.strerror or error}") from error


def _result(plan: LadderPlan, run: PlannedRun, code: int | None = None) -> RungResult:
    record = _record(plan.folder_of(run))
    if record is None:
        return RungResult(run, "not begun", exit_code=code)
    _refuse_other(plan, run, record)
    curve, at = _losses(record), run
    ended_at_nan = not isfinite(curve.get(run.steps, 0.0))
    while at.parent is not None:
        # A fork has no lines of the steps before it.
        trunk = next(one for one in plan.runs if one.name == at.parent)
        before = _record(plan.folder_of(trunk))
        shared = {} if before is None else {step: loss for step, loss in _losses(before).items() if step <= at.first}
        curve, at = {**shared, **curve}, trunk
    points = tuple(sorted((step, loss) for step, loss in curve.items() if step <= run.steps and isfinite(loss)))
    state = NOT_FINITE if ended_at_nan else record.status.state
    return RungResult(run, state, points, active_seconds(record), code, _scores(record, run.steps))


def _refuse_other(plan: LadderPlan, run: PlannedRun, record: RunRecord) -> None:
    """Raise PlanError if a folder has a run with other settings than those of its place in the ladder."""
    if record.recipe is None:
        if record.settings or record.metrics:
            unknown = "has a run whose recipe is unknown, or of another version of hlat"
            raise PlanError(f"{record.folder}: {unknown}. Move it away, or use --to NEW")
        return
    before, now = (
        {**loss_settings(recipe), "training.steps": recipe.total_steps}
        for recipe in (record.recipe, plan.recipe_of(run))
    )
    if problems := changed(before, now):
        raise PlanError(
            f"{record.folder}: has a run with other settings ({listed(problems, NAMED, '; ')}). Move it away, or use "
            "--to NEW"
        )


def _record(folder: Path) -> RunRecord | None:
    return read_run(folder) if is_run(folder) else None


def _losses(record: RunRecord) -> dict[int, float]:
    steps, losses = record.metrics.get("val_loss", ((), ()))
    return {int(step): float(loss) for step, loss in zip(steps, losses, strict=True)}


def _scores(record: RunRecord, end: int) -> dict[str, float]:
    scores = {name: each for name, each in record.metrics.items() if name.startswith("task/") and end in each[0][-1:]}
    return {name.removeprefix("task/"): float(values[-1]) for name, (_, values) in scores.items()}


def ladder_of(plan: LadderPlan, results: Sequence[RungResult]) -> Ladder | None:
    """Return the ladder of the finished runs; None if there are none."""
    runs = []
    for result in results:
        if result.loss is not None:
            run = result.run
            sizes = sizes_of(plan.recipe_of(run))
            curve = tuple((step / run.steps, loss) for step, loss in result.curve)
            # Runs of a size and a seed share samples and first weights, and so noise, whether they are forks or not.
            trunk = next(one.name for one in plan.runs if (one.size, one.seed) == (run.size, run.seed))
            runs.append(LadderRun(run.name, sizes, run.tokens, result.loss, curve, trunk, result.scores))
    return Ladder(tuple(runs), plan.conditions) if runs else None
