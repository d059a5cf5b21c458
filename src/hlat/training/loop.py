"""The whole story of a run, told in order.

build or resume -> [ batch -> forward and backward -> clip -> AdamW -> validate? -> metrics -> save? ] -> end
"""

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hlat.config import HlatError, Recipe, StorageError
from hlat.runtime import joined, place, rank_log
from hlat.tracking import OtherRank, Tracker, open_tracker
from hlat.training.feed import Feed
from hlat.training.garbage import controlled_garbage
from hlat.training.job import DataProgress, Job, build_job, no_progress
from hlat.training.lock import run_lock
from hlat.training.numbers import check_numbers
from hlat.training.profile import profiled
from hlat.training.report import announce, step_metrics
from hlat.training.signals import StopRequest
from hlat.training.step import StepResult, accumulate_gradients, update
from hlat.training.stopwatch import Stopwatch
from hlat.training.validation import ValidationResult, validate


@dataclass(frozen=True)
class Outcome:
    """How a run, or this part of it, ended."""

    step: int
    total_steps: int
    reason: str  # "finished", "stop_after", or the name of the signal that asked for an end
    checkpoint: Path | None  # None if the run was asked to end before its first step
    validation: ValidationResult | None  # of the last step, where that step validated

    @property
    def finished(self) -> bool:
        """Whether the whole run is done, not only this part of it."""
        return self.step >= self.total_steps


def run(
    recipe: Recipe,
    *,
    stream: TextIO | None = None,
    data_progress: DataProgress = no_progress,
    profile: bool = False,
) -> Outcome:
    """Train as the recipe says, from the newest valid checkpoint in its run directory if there is one.

    Every process of a run calls this; the environment says which of how many it is (torchrun, ``hlat train --nproc``).

    Args:
        recipe: a validated recipe.
        stream: where the console's lines go; standard output if None.
        data_progress: opens a display for the time that text is prepared.
        profile: write a trace of steps 4 to 6 of this process, and a table, to <run.dir>/profile.

    Raises:
        HlatError: the run cannot start or go on; the message says why and what would work.
    """
    here = place()
    with rank_log(recipe.run_dir, here.rank, here.world), joined(recipe.run.device) as runtime, ExitStack() as stack:
        runtime.ranks.first(lambda: _lock(stack, recipe))
        job = build_job(recipe, runtime, data_progress)
        tracker = _tracker(job, stream)
        stack.enter_context(tracker)
        announce(job, tracker)
        try:
            return _train(job, tracker, profile)
        except HlatError as error:
            tracker.event("error", step=job.step, message=str(error))
            raise


def _lock(stack: ExitStack, recipe: Recipe) -> None:
    stack.enter_context(run_lock(recipe.run_dir))


def _tracker(job: Job, stream: TextIO | None) -> Tracker | OtherRank:
    """Rank 0 keeps the record; what the others have to say goes to their logs."""
    if not job.runtime.ranks.is_first:
        return OtherRank()
    recipe = job.recipe
    return open_tracker(
        recipe.run_dir, recipe.tracking, total_steps=recipe.total_steps, start_step=job.step, stream=stream
    )


def _train(job: Job, tracker: Tracker | OtherRank, profile: bool) -> Outcome:
    recipe, total, watch = job.recipe, job.recipe.total_steps, Stopwatch()
    last = min(total, job.step + recipe.training.stop_after) if recipe.training.stop_after else total
    logged, validation, result, signalled = job.step, None, None, None

    def heard(name: str) -> None:
        tracker.message(f"{name}: ending after this step; once more ends at once")

    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest(job.runtime.ranks, heard))
        feed = stack.enter_context(_feed(job, tracker))
        garbage = stack.enter_context(controlled_garbage())
        step_done = stack.enter_context(
            profiled(profile, recipe.run_dir / "profile", job.runtime.rank, tracker.message)
        )
        while job.step < last and signalled is None:
            stop.ask()
            result = _step(job, feed, watch)
            validation = None
            if _due(job.step, recipe.evaluation.every_steps, total):
                with watch.phase("validation"):
                    validation = _validate(job)
            if validation is not None or _due(job.step, recipe.training.log_every, total):
                tracker.log(step_metrics(job, result, validation, job.step - logged, watch))
                logged = job.step
                check_numbers(job, result)
            if _save_due(job) and job.step < last:
                with watch.phase("checkpoint"):
                    _save(job, result, tracker)
            step_done()
            garbage.after_step(job.step)
            signalled = stop.agreed()
        if result is not None and (job.saved is None or job.saved.step != job.step):
            _save(job, result, tracker, must_succeed=True)

    reason = "finished" if job.step >= total else signalled.name if signalled is not None else "stop_after"
    tracker.event("end", step=job.step, reason=reason)
    return Outcome(job.step, total, reason, job.saved.path if job.saved is not None else None, validation)


def _feed(job: Job, tracker: Tracker | OtherRank) -> Feed:
    pinned = job.runtime.device.type == "cuda"
    reader = job.training_data.reader(job.model, job.samples)
    return Feed(reader, job.recipe.batch.global_batch, pinned, lambda note: tracker.message(f"data: {note}"))


def _step(job: Job, feed: Feed, watch: Stopwatch) -> StepResult:
    with watch.phase("data"):
        reading = feed.take(job.samples)
    with watch.phase("forward_backward"):
        loss = accumulate_gradients(job.model, reading.batch)
    with watch.phase("optimizer"):
        result = update(job.model, job.optimizer, job.recipe, job.step + 1, loss)
    job.training_data.advance(reading.progress)
    job.batch = reading.batch
    job.step += 1
    return result


def _due(step: int, every: int | None, total: int) -> bool:
    return step == total or (every is not None and step % every == 0)


def _validate(job: Job) -> ValidationResult | None:
    if job.validation_data is None:
        return None
    return validate(job.model, job.validation_data, job.recipe.batch.micro_batch)


def _save_due(job: Job) -> bool:
    config = job.recipe.checkpoint
    periods = [every for every in (config.every_steps, config.keep_every_steps) if every is not None]
    return any(job.step % every == 0 for every in periods)


def _save(job: Job, result: StepResult, tracker: Tracker | OtherRank, must_succeed: bool = False) -> None:
    """Save; before the end, a store that refuses is an event and not the end of the run: the next save may succeed."""
    check_numbers(job, result)
    try:
        path = job.save()
    except StorageError as error:
        if must_succeed:
            raise
        with suppress(StorageError):  # the disk that refused the checkpoint may refuse the event too
            tracker.event("checkpoint_failed", step=job.step, message=str(error))
        tracker.message(f"checkpoint of step {job.step} failed, training goes on: {error}")
        return
    tracker.event("checkpoint", step=job.step, path=str(path))
