"""The whole story of a run, told in order.

build or resume -> [ batch -> forward and backward -> verdict -> clip -> AdamW -> save? -> validate? -> metrics ] -> end
                                                       |-> back to a checkpoint
"""

import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hlat.config import Recipe
from hlat.config.sections import refuse_faults
from hlat.resilience import Verdict, count_steps, trains_in
from hlat.runtime import HlatError, StorageError, rank_info
from hlat.runtime.distributed import Runtime, joined_run
from hlat.runtime.process import enter_phase, observe_phases, rank_log
from hlat.runtime.storage import EarlierAttempt, RunFolder, hold_run_folder, open_run_folder
from hlat.tracking import OtherRank, Tracker, open_tracker
from hlat.training.batches import Feed
from hlat.training.divergence import tell_verdict
from hlat.training.fault_injection import injected_faults
from hlat.training.metrics_line import Lines
from hlat.training.process import Deadline, StopRequest, Stopwatch, controlled_garbage, profiled, run_lock
from hlat.training.run_state import DataProgress, Job, build_job, no_progress
from hlat.training.saving import Integrity, Saving, background_saver, roll_back, saver_beside
from hlat.training.step import StepResult, accumulate_gradients, update
from hlat.training.step_metrics import announce
from hlat.training.validation import ValidationResult


@dataclass(frozen=True)
class Outcome:
    """How a run, or this part of it, ended."""

    step: int
    total_steps: int
    reason: str  # "finished", "stop_after", "deadline", or the name of the signal that asked for an end
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
    allow_faults: bool = False,
    require_step: int | None = None,
    earlier: EarlierAttempt | None = None,
) -> Outcome:
    """Train as the recipe says, from the newest valid checkpoint in its run directory if there is one.

    Every process of a run calls this; the environment says which of how many it is (torchrun, ``hlat train --nproc``).

    Args:
        recipe: a validated recipe.
        stream: where the console's lines go; standard output if None.
        data_progress: opens a display for the time that text is prepared.
        profile: write a trace of steps 4 to 6 of this process, and a table, to <run.dir>/profile.
        allow_faults: inject the faults that the recipe lists; a recipe that lists some is refused otherwise.
        require_step: go on from the checkpoint of this step, which has to be the newest, or not at all.
        earlier: what the attempt of this run before this one left: it goes on from there, or not at all.

    Raises:
        HlatError: the run cannot start or go on; the message says why and what would work.
    """
    refuse_faults(recipe.faults, allow_faults)
    here = rank_info()
    open_run_folder(recipe.run_dir, earlier)
    with (
        rank_log(recipe.run_dir, here.rank, here.world),
        saver_beside(recipe, here) as saver,  # early: a copy of this process is cheap, and possible, only now
        joined_run(recipe.run.device, recipe.run.deterministic, recipe.run_dir) as runtime,
        ExitStack() as stack,
    ):
        folder = _held(stack, recipe, runtime, stream)
        open_run_folder(recipe.run_dir, earlier)  # again: the lock may have been waited for
        job = build_job(recipe, runtime, folder, data_progress, require_step, earlier)
        if folder.run_id is not None:
            trains_in(folder.run_id)
        tracker = _tracker(job, stream)
        stack.enter_context(tracker)
        announce(job, tracker)
        integrity = Integrity(job, tracker)
        saving = Saving(job, tracker, integrity, background_saver(saver, job))
        try:
            return _train(job, tracker, profile, integrity, saving)
        except HlatError as error:
            with suppress(StorageError):  # the disk that the error may be about
                tracker.event("error", step=job.step, message=str(error))
            raise


def _held(stack: ExitStack, recipe: Recipe, runtime: Runtime, stream: TextIO | None) -> RunFolder:
    """The run's folder, locked by rank 0 and held by every rank."""
    locks: list[int] = []
    runtime.ranks.run_on_rank0(lambda: locks.append(_lock(stack, recipe, stream)))
    lock = locks[0] if locks else None
    return runtime.ranks.run_on_all(
        lambda: stack.enter_context(hold_run_folder(recipe.run_dir, lock, runtime.ranks.rank))
    )


def _lock(stack: ExitStack, recipe: Recipe, stream: TextIO | None) -> int:
    def say(text: str) -> None:
        with suppress(OSError):  # a console that has gone away must not end the run
            (stream or sys.stdout).write(text + "\n")
            (stream or sys.stdout).flush()

    return stack.enter_context(run_lock(recipe.run_dir, say))


def _tracker(job: Job, stream: TextIO | None) -> Tracker | OtherRank:
    """Rank 0 keeps the record; what the others have to say goes to their logs."""
    if not job.runtime.ranks.is_first:
        return OtherRank()
    recipe = job.recipe
    return open_tracker(
        recipe.run_dir, recipe.tracking, total_steps=recipe.total_steps, start_step=job.step, stream=stream
    )


def _train(job: Job, tracker: Tracker | OtherRank, profile: bool, integrity: Integrity, saving: Saving) -> Outcome:
    recipe, total = job.recipe, job.recipe.total_steps
    last = min(total, job.step + recipe.training.stop_after) if recipe.training.stop_after else total
    result, signalled = None, None

    def heard(name: str) -> None:
        tracker.message(f"{name}: ending after this step; once more ends at once")

    with ExitStack() as stack:
        watch = Stopwatch()
        stack.enter_context(observe_phases(watch))
        deadline = Deadline(recipe.recovery, lambda: saving.longest)
        stop = stack.enter_context(StopRequest(job.runtime.ranks, heard, lambda: deadline.has_come))
        count_steps(lambda: job.step)
        feed = stack.enter_context(_feed(job, tracker))
        garbage = stack.enter_context(controlled_garbage())
        step_done = stack.enter_context(
            profiled(profile, recipe.run_dir / "profile", job.runtime.rank, tracker.message)
        )
        faults = stack.enter_context(injected_faults(job))
        lines = Lines(job, tracker, watch)
        validation = lines.owed()
        while job.step < last and signalled is None:
            stop.ask()
            saving.ask()
            faults.begin_step(job.step + 1, job.anomalies.skipped.start(job.step))
            result = _step(job, feed)
            if result.verdict.action in ("rollback", "stop"):
                saving.settle()  # what is being written comes first: it may be the newest good state
            tell_verdict(job, result, tracker)
            if result.verdict.action == "rollback":
                roll_back(job, feed, tracker)
                lines.go_back()
                validation, result = None, None
                signalled = stop.agreed()
                continue
            integrity.after_step()
            signalled = stop.agreed()
            lines.begin(result)
            saving.after_step(result, is_last=job.step == last or signalled is not None)
            validation = lines.finish()
            step_done()
            garbage.after_step(job.step)
        saving.at_end(result)
        enter_phase("end")

    reason = "finished" if job.step >= total else signalled if signalled is not None else "stop_after"
    tracker.event("end", step=job.step, reason=reason)
    return Outcome(job.step, total, reason, job.saved.path if job.saved is not None else None, validation)


def _feed(job: Job, tracker: Tracker | OtherRank) -> Feed:
    pinned = job.runtime.device.type == "cuda"
    reader = job.training_data.reader(job.model, job.samples)
    return Feed(reader, job.recipe.batch.global_batch, pinned, lambda note: tracker.message(f"data: {note}"))


def _step(job: Job, feed: Feed) -> StepResult:
    enter_phase("data")
    skipped = job.anomalies.skipped
    for left_out in skipped.before_step(job.step):  # read and dropped: online, what follows depends on it
        job.training_data.advance(feed.take(left_out).progress)
    samples = skipped.start(job.step)
    reading = feed.take(samples)
    loss = accumulate_gradients(job.model, reading.batch)

    def judge(loss: float, norm: float) -> Verdict:
        return job.anomalies.judge(job.step + 1, samples, loss, norm)

    result = update(job.model, job.optimizer, job.recipe, job.step + 1, loss, judge)
    enter_phase("between")
    job.training_data.advance(reading.progress)
    job.batch = reading.batch
    job.step += 1
    return result
