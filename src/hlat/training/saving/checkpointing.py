"""Checkpointer: saves the state of a run when the recipe says so. And rollback: return to an earlier state in place.

    checkpoint due --> state --copied to shared memory--> saver process writes it during the next steps --> result is
                                                                                          received after a later step
                             --> written by this process, if there is no saver (blocking), or at the end of a small run
    snapshot due ----> state --> the same way, as a snapshot
    end of the run --> state --> as a checkpoint, and waited for

    roll_back: newest valid checkpoint, or the initial state
        -> weights, optimizer state, RNG, data cursors, anomaly policy
        -> components, prefetcher and metrics continue from there, without the samples that spoiled the step

A failed save is an event, not the end of the run, until ``checkpoint.failures`` saves in a row have failed.

After a rollback, steps that are repeated read the same samples and give the same bits, so the result does not depend on
the checkpoint from which they start. Processes, process groups and compiled code stay.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from hlat.checkpoint import (
    AsyncSaver,
    CheckpointContent,
    FailedAttempt,
    SaveOutcome,
    SaveResult,
    SaverReport,
    SlowStorage,
    SnapshotResult,
    TierEvent,
    TierSettings,
    load_weights,
    run_saver,
    save_with_retries,
)
from hlat.config import CheckpointConfig, Recipe
from hlat.forecast import ForecastWatch
from hlat.model import count_parameters, initialise
from hlat.resilience import open_saver_progress, record_durable_step, record_saver, reset_durable_step
from hlat.runtime.errors import StorageError
from hlat.runtime.helper_process import HelperProcess, start_helper
from hlat.runtime.process import RankInfo
from hlat.runtime.progress import ProgressRecord, enter_phase
from hlat.runtime.randomness import seed_generators
from hlat.runtime.storage.run_folder import EarlierAttempt
from hlat.tracking import OtherRankTracker, Tracker
from hlat.training.batches import BatchPrefetcher
from hlat.training.components import StepEnd, StepResult, TrainingComponent, enters_stage, load_state
from hlat.training.faulty_disk import checkpoint_disk
from hlat.training.interruptions import SnapshotClock, report_tier_notes
from hlat.training.run_state import RunState, SavedCheckpoint, check_nothing_lost, report_damaged
from hlat.training.saving.corruption_check import CorruptionCheck
from hlat.training.step_metrics import check_finite, multiples_after


@contextmanager
def saver_process(recipe: Recipe, rank_info: RankInfo) -> Iterator[HelperProcess | None]:
    """Run this rank's saver process inside the block; yields None if the recipe saves without one."""
    config = recipe.checkpoint
    # A process of its own, and its copy of the state, are worth their time only if steps go on meanwhile.
    needed = config.local is not None or (saves_after(recipe, 0) > 0 if _ends_here(recipe) else _periods(config))
    if not config.background or not needed:
        yield None
        return
    process = start_helper(
        partial(run_saver, rank_info=rank_info, make_disk=partial(checkpoint_disk, recipe, rank_info.rank)),
        open_saver_progress(),
    )
    record_saver(process.pid)
    try:
        yield process
    except KeyboardInterrupt:
        # A begun save is finished and waited for below, but not after a second signal.
        process.close()
        raise
    except BaseException:
        process.close()
        process.wait(ProgressRecord.BLOCKED_LIMIT)  # it may be silent because another rank's saver is slow
        raise
    process.close()
    process.wait(recipe.recovery.hang_seconds)


def background_saver(process: HelperProcess | None, state: RunState) -> AsyncSaver | None:
    """Wrap the saver process in an AsyncSaver; None if there is no process."""
    if process is None:
        return None
    recipe = state.recipe
    tiers = TierSettings(recipe.checkpoint, recipe.run_dir, recipe.run.name)
    hang_seconds = recipe.recovery.hang_seconds
    return AsyncSaver(process, state.runtime, state.store, recipe.checkpoint.retries, tiers, hang_seconds)


class Checkpointer(TrainingComponent):
    """Saves checkpoints and snapshots as the recipe says; without ``background``, training waits for each."""

    def __init__(
        self,
        state: RunState,
        tracker: Tracker | OtherRankTracker,
        corruption_check: CorruptionCheck,
        background: AsyncSaver | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._tracker, self.corruption_check = state, tracker, corruption_check
        self._background, self._clock = background, clock
        self._config = state.recipe.checkpoint
        self._prepared = False
        self._postponed = False  # True while a checkpoint waits for an update that is applied
        self._pending = False  # True while a submitted save has no result yet
        self._stall: dict[str, float] = {}  # seconds that training stood still for the save
        self._failures: list[SaveResult] = []  # in a row
        self.longest_save = 0.0  # seconds of the longest save, until it was durable or had failed
        local = self._config.local
        self._snapshots = SnapshotClock(local.every_seconds if local is not None else None, state.runtime.ranks, clock)
        self._last_snapshot_failed = False

    @property
    def background(self) -> AsyncSaver | None:
        """The saver process; None if there is none, or it is lost."""
        return self._background

    def before_step(self) -> None:
        self._snapshots.start_vote(busy=self._pending)

    def after_step(self, end: StepEnd) -> None:
        """Save a checkpoint or a snapshot, if one is due; the last step is always saved. Collective.

        Raises:
            StateLostError: the run's folder is gone.
            StorageError: ``checkpoint.failures`` saves in a row have failed.
        """
        self._receive(wait=False)
        self._prepare()
        snapshot_due = self._snapshots.is_due()
        scheduled = any(self._state.step % every == 0 for every in _periods(self._config))
        checkpoint_due = end.is_last or scheduled or self._postponed
        if not checkpoint_due and not snapshot_due:
            return
        # Weights without a finite gradient may be ruined, and would take the place of good ones: the save waits for the
        # next update that is applied.
        if end.result.verdict.leaves_doubt and not end.is_last:
            self._postponed = checkpoint_due
            return
        self._postponed = False
        begin = self._clock()
        self.wait_for_save()
        waited = self._clock() - begin
        enter_phase("checkpoint")
        # The wait may have added a failure. Checked again after the save, which may be the one too many.
        self._check_failure_limit()
        self._check_state(end.result)  # after the wait, so that an error names the newest good state
        self._save(begin, waited, snapshot=not checkpoint_due, here=end.is_last and _ends_here(self._state.recipe))
        self._check_failure_limit()
        self._snapshots.restart()
        enter_phase("between")

    def wait_for_save(self) -> None:
        """Wait until the pending save is durable or has failed, with the same result on every rank. Collective."""
        if self._background is None:
            return
        enter_phase("saving")
        self._receive(wait=True)
        settled = self._background.agree_on_outcome()
        if settled.result is not None and self._pending:  # this rank's saver died before it could report
            self._finish_save(settled.result)
        if settled.lost:
            self._fall_back_to_blocking_saves(settled)

    def at_end(self, result: StepResult | None) -> None:
        """Wait for the last step's save; raises StateLostError or StorageError if it is not durable. Collective."""
        self._snapshots.is_due()  # completes an open vote
        # There was no step, or it was rolled back.
        if result is None:
            return
        self.wait_for_save()
        if not self._is_saved():
            self._state.check_folder()
            raise StorageError(self._failures[-1].message)
        background = self._background
        if background is not None:
            self._handle_notes(background.finish_uploads())
            self.wait_for_save()
        if self._background is not background:  # its savers were lost while they uploaded
            report_tier_notes(self._state.tiers.upload(), self._tracker)
        enter_phase("end")
        # Last: the end of the run is durable as a checkpoint, so no restart needs a snapshot.
        self._state.tiers.clear_snapshots()

    def _prepare(self) -> None:
        if (
            not self._prepared and self._background is not None
        ):  # after the first step, when the optimizer has its state
            self._background.prepare(self._state.content().chunks)
            self._prepared = True

    def _is_saved(self) -> bool:
        return self._state.saved is not None and self._state.saved.step == self._state.step

    def _check_state(self, result: StepResult) -> None:
        self._state.check_folder()
        check_finite(self._state, result)
        self.corruption_check.before_save()

    def _save(self, begin: float, waited: float, *, snapshot: bool, here: bool) -> None:
        content = self._state.content()
        if self._background is None or here:
            self._save_blocking(content, snapshot)
            return
        self._background.submit(content, snapshot)
        self._pending = True
        self._stall = {"stall_seconds": self._clock() - begin, "waited_seconds": waited}

    def _save_blocking(self, content: CheckpointContent, snapshot: bool = False) -> None:
        result: SaveResult | SnapshotResult
        if snapshot:
            result = self._state.tiers.snapshot(content)
        else:
            result = save_with_retries(self._state.store, content, self._config.retries, self._report_refusal)
        self._stall = {"stall_seconds": result.seconds, "waited_seconds": 0.0}
        self._finish_save(result)
        if isinstance(result, SaveResult) and result.path is not None:
            report_tier_notes(self._state.tiers.upload(), self._tracker)

    def _receive(self, wait: bool) -> None:
        if self._background is not None:
            self._handle_notes(self._background.reports(wait))

    def _handle_notes(self, notes: Iterator[SaverReport]) -> None:
        for note in notes:
            if isinstance(note, FailedAttempt):
                self._report_refusal(note)
            elif isinstance(note, TierEvent):
                report_tier_notes([note], self._tracker)
            elif isinstance(note, SlowStorage):
                text = f"the storage has not answered the saver of rank {note.rank} for {note.seconds:.0f} s: waiting"
                self._report("storage_slow", text, rank=note.rank, seconds=note.seconds)
            else:
                self._finish_save(note)

    def _fall_back_to_blocking_saves(self, settled: SaveOutcome) -> None:
        assert self._background is not None, "called once its savers have died"
        enter_phase("checkpoint")
        # Savers of all ranks write one checkpoint together: without one of them the others are of no use.
        self._state.runtime.ranks.run_on_all(self._background.kill)
        self._background = None
        for rank, reason in settled.lost.items():
            self._report("saver_lost", f"the saver process of rank {rank} is lost: {reason}", rank=rank, message=reason)
        self._tracker.warn(
            "checkpoints are written by the ranks themselves from here on: training waits for every save"
        )
        self._state.store.clean_up()
        if settled.pending is not None:
            self._save_blocking(settled.pending)

    def _finish_save(self, result: SaveResult | SnapshotResult) -> None:
        self._pending = False
        self.longest_save = max(self.longest_save, result.seconds)
        step = result.step
        if isinstance(result, SnapshotResult):
            self._finish_snapshot(result)
            return
        if result.path is None:
            self._failures.append(result)
            text = f"checkpoint of step {step} failed, training continues: {result.message}"
            self._report("checkpoint_failed", text, step=step, message=result.message, tries=result.attempts)
            return
        self._failures = []
        self._state.saved = SavedCheckpoint(step, result.path)
        record_durable_step(step)
        fields = {"seconds": result.seconds, **self._stall, "tries": result.attempts}
        self._tracker.event("checkpoint", step=step, path=str(result.path), **fields)
        if result.message:
            text = f"checkpoint of step {step} is saved, but {result.message}"
            self._report("checkpoint_prune_failed", text, step=step, message=result.message)

    def _finish_snapshot(self, result: SnapshotResult) -> None:
        failed, failed_before = result.name is None, self._last_snapshot_failed
        self._last_snapshot_failed = failed
        if not failed:
            record_durable_step(result.step)
        with suppress(StorageError):
            if failed:
                self._tracker.event("snapshot_failed", step=result.step, message=result.message)
            else:
                self._tracker.event(
                    "snapshot", step=result.step, name=result.name, seconds=result.seconds, **self._stall
                )
        if failed and not failed_before:  # once: a full folder fails many in a row
            self._tracker.warn(f"snapshot of step {result.step} failed, training continues: {result.message}")

    def _report_refusal(self, refusal: FailedAttempt) -> None:
        text = f"checkpoint of step {refusal.step}: attempt {refusal.attempts} failed, retrying: {refusal.message}"
        self._report("checkpoint_retry", text, step=refusal.step, message=refusal.message, tries=refusal.attempts)

    def _report(self, kind: str, text: str, **fields: Any) -> None:
        with suppress(StorageError):  # the disk that failed the checkpoint may fail the event too
            self._tracker.event(kind, **fields)
        self._tracker.warn(text)

    def _check_failure_limit(self) -> None:
        count = len(self._failures)
        if count < self._config.failures:
            return
        saved = self._state.saved
        good = f"The newest checkpoint is {saved.path}." if saved is not None else "There is no checkpoint."
        raise StorageError(
            f"{count} saves in a row have failed, as many as checkpoint.failures allows; the last one, of step "
            f"{self._failures[-1].step}: {self._failures[-1].message} {good}"
        )


def saves_after(recipe: Recipe, step: int) -> int:
    """Count the checkpoints that come after a step, without that of the last step."""
    return max(
        (multiples_after(every, step, recipe.total_steps - 1) for every in _periods(recipe.checkpoint)), default=0
    )


_SMALL = 16_000_000  # parameters, of which weights, optimizer state and average are a quarter of a gigabyte


def _ends_here(recipe: Recipe) -> bool:
    """Return True if a run is so small that its processes write its last checkpoint themselves."""
    # By the recipe, so that all ranks decide alike. Nothing overlaps with this save, and a process of low priority
    # would take as long as the start of the program on a busy machine. An upload belongs to the one who uploads.
    return count_parameters(recipe.model).total <= _SMALL and recipe.checkpoint.remote is None


def _periods(config: CheckpointConfig) -> list[int]:
    """Return the checkpoint periods in steps: of every_steps, keep_every_steps and exports."""
    exports = config.export.every_steps if config.export is not None else None
    return [every for every in (config.every_steps, config.keep_every_steps, exports) if every is not None]


def roll_back(state: RunState, prefetcher: BatchPrefetcher, tracker: Tracker | OtherRankTracker) -> None:
    """Undo the steps since the newest checkpoint, including the anomalous one. Collective.

    Raises:
        CheckpointError: there are checkpoints, but none is valid.
        StateLostError: the newest checkpoint, or the run's folder, is gone.
    """
    enter_phase("checkpoint")
    undone, damaged_before = state.step, len(state.damaged)
    prefetcher.discard()
    state.check_folder()  # a missing folder would look like a run without checkpoints
    checkpoint = state.store.newest()
    report_damaged(state.damaged[damaged_before:], tracker)
    found, expected = checkpoint.step if checkpoint is not None else None, state.saved
    durable = EarlierAttempt(expected.step, "") if expected is not None else None
    check_nothing_lost(state.runtime.ranks, state.recipe.run_dir, found, durable, state.damaged[damaged_before:])
    if expected is not None and (found or 0) < expected.step:
        reset_durable_step(found)
    if checkpoint is None:
        _reset_to_start(state)
    else:
        assert checkpoint.step < undone, "a step is saved only after its anomaly check"
        state.runtime.ranks.run_on_all(
            lambda: load_state(checkpoint, state.recipe, state.model, state.optimizer, state.components)
        )
    state.training_data.restore(checkpoint)
    state.anomalies.roll_back(checkpoint.meta.get("anomalies") if checkpoint is not None else None)
    if checkpoint is not None and enters_stage(checkpoint, state.recipe):
        state.anomalies.begin_stage()  # as a run does that is started here
    state.forecast_watch = ForecastWatch(**(checkpoint.meta.get("forecast_watch", {}) if checkpoint else {}))
    state.step = checkpoint.step if checkpoint is not None else 0
    state.saved = SavedCheckpoint(checkpoint.step, checkpoint.path) if checkpoint is not None else None
    prefetcher.restart(state.training_data.reader(state.model, state.samples))
    tracker.rewind(state.step)
    tracker.event("rollback", step=state.step, undone=undone, path=str(checkpoint.path) if checkpoint else None)
    enter_phase("between")


def _reset_to_start(state: RunState) -> None:
    recipe = state.recipe
    seed_generators(recipe.training.seed)
    if recipe.checkpoint.init_from is None:
        initialise(state.model.local_parameters, recipe.model, recipe.training.seed, recipe.optimizer)
    else:
        parameters, expected = state.model.local_parameters, state.initial_weights
        load_weights(recipe.checkpoint.init_from, recipe.model, parameters, state.runtime.ranks, expected)
    state.optimizer.state.clear()
    state.components.reset()
