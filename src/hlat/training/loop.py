"""The whole story of a run, told in order.

build or resume -> [ batch -> forward and backward -> clip -> AdamW -> validate? -> metrics -> save? ] -> end
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hlat.config import HlatError, Recipe, StorageError
from hlat.data import Progress
from hlat.tracking import Tracker, open_tracker
from hlat.training.job import Job, build_job
from hlat.training.lock import run_lock
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
    checkpoint: Path
    validation: ValidationResult | None  # of the last step, where that step validated

    @property
    def finished(self) -> bool:
        """Whether the whole run is done, not only this part of it."""
        return self.step >= self.total_steps


def run(recipe: Recipe, *, stream: TextIO | None = None, progress: Progress | None = None) -> Outcome:
    """Train as the recipe says, from the newest valid checkpoint in its run directory if there is one.

    Args:
        recipe: a validated recipe.
        stream: where the console's lines go; standard output if None.
        progress: told (stage, bytes done, bytes in all) while text is prepared.

    Raises:
        HlatError: the run cannot start or go on; the message says why and what would work.
    """
    with run_lock(recipe.run_dir):
        job = build_job(recipe, progress)
        with open_tracker(
            recipe.run_dir, recipe.tracking, total_steps=recipe.total_steps, start_step=job.step, stream=stream
        ) as tracker:
            announce(job, tracker)
            try:
                return _train(job, tracker)
            except HlatError as error:
                tracker.event("error", step=job.step, message=str(error))
                raise


def _train(job: Job, tracker: Tracker) -> Outcome:
    recipe, total, watch = job.recipe, job.recipe.total_steps, Stopwatch()
    last = min(total, job.step + recipe.training.stop_after) if recipe.training.stop_after else total
    logged, validation = job.step, None

    with StopRequest(lambda name: tracker.message(f"{name}: ending after this step; once more ends at once")) as stop:
        while job.step < last and stop.signal is None:
            result = _step(job, watch)
            validation = None
            if _due(job.step, recipe.evaluation.every_steps, total):
                with watch.phase("validation"):
                    validation = _validate(job)
            if validation is not None or _due(job.step, recipe.training.log_every, total):
                tracker.log(step_metrics(job, result, validation, job.step - logged, watch))
                logged = job.step
            if _save_due(job):
                with watch.phase("checkpoint"):
                    _save(job, tracker)
        checkpoint = _save_last(job, tracker)

    reason = "finished" if job.step >= total else stop.signal.name if stop.signal is not None else "stop_after"
    tracker.event("end", step=job.step, reason=reason)
    return Outcome(job.step, total, reason, checkpoint, validation)


def _step(job: Job, watch: Stopwatch) -> StepResult:
    with watch.phase("data"):
        batch = job.training_data.batch(job.samples, job.recipe.batch.global_batch)
    with watch.phase("forward_backward"):
        loss = accumulate_gradients(job.model, batch, job.recipe, job.runtime.device)
    with watch.phase("optimizer"):
        norm, rate = update(job.model, job.optimizer, job.recipe, job.step + 1)
    job.step += 1
    return StepResult(batch, loss, norm, rate)


def _due(step: int, every: int | None, total: int) -> bool:
    return step == total or (every is not None and step % every == 0)


def _validate(job: Job) -> ValidationResult | None:
    if job.validation_data is None:
        return None
    recipe = job.recipe
    return validate(job.model, job.validation_data, recipe.precision, job.runtime.device, recipe.batch.micro_batch)


def _save_due(job: Job) -> bool:
    config = job.recipe.checkpoint
    periods = [every for every in (config.every_steps, config.keep_every_steps) if every is not None]
    return any(job.step % every == 0 for every in periods)


def _save(job: Job, tracker: Tracker) -> None:
    """Save; a store that refuses is an event, not the end of the run: the next save may succeed."""
    try:
        path = job.save()
    except StorageError as error:
        tracker.event("checkpoint_failed", step=job.step, message=str(error))
        tracker.message(f"checkpoint of step {job.step} failed, training goes on: {error}")
        return
    tracker.event("checkpoint", step=job.step, path=str(path))


def _save_last(job: Job, tracker: Tracker) -> Path:
    """The checkpoint of the last step, written now unless the loop has just done it; here a failure is one."""
    if job.saved is None or job.saved.step != job.step:
        tracker.event("checkpoint", step=job.step, path=str(job.save()))
    assert job.saved is not None, "save() remembers what it saved"
    return job.saved.path
