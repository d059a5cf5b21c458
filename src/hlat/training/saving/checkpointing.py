"""When the state of a run is saved, how, and what is said when that does not succeed.

    a step is done --due?--> state --copied--> saver: written while the next steps are computed --> heard after a step
                                   --> written here, where there is no saver
    time has passed -------> state --> the same way, as a snapshot
    the run ends   --------> state --> as above, and waited for

A store that refuses is an event, not the end of the run, until it has refused so many saves in a row as the recipe
allows.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from hlat.checkpoint.background import AsyncSaver, SaveOutcome, SaverReport, run_saver
from hlat.checkpoint.protocol import CheckpointContent, FailedAttempt, SaveResult, save_with_retries
from hlat.checkpoint.tiers import SnapshotResult, TierEvent, TierSettings
from hlat.config import Recipe
from hlat.config.sections import CheckpointConfig
from hlat.resilience import saves_beside, secured
from hlat.runtime import RankInfo, StorageError
from hlat.runtime.distributed import HelperProcess, start_helper
from hlat.runtime.process import enter_phase
from hlat.tracking import OtherRank, Tracker
from hlat.training.divergence import check_numbers
from hlat.training.faulty_disk import disk_of
from hlat.training.newest_saved import Saved
from hlat.training.process import SnapshotClock, tell_notes
from hlat.training.run_state import Job
from hlat.training.saving.corruption_check import Integrity
from hlat.training.step import StepResult


@contextmanager
def saver_beside(recipe: Recipe, here: RankInfo) -> Iterator[HelperProcess | None]:
    """Start the process that writes checkpoints beside this rank, and see it leave; None where the recipe has none.

    It finishes what it has begun. An interrupt, which asks for the end at once, does not wait for that.
    """
    config = recipe.checkpoint
    if not config.background or not (_periods(config) or config.local):
        yield None
        return
    process = start_helper(partial(run_saver, rank_info=here, make_disk=partial(disk_of, recipe, here.rank)))
    saves_beside(process.pid)
    try:
        yield process
    except KeyboardInterrupt:
        process.close()
        raise
    except BaseException:
        process.close()
        process.wait()
        raise
    process.close()
    process.wait()


def background_saver(process: HelperProcess | None, job: Job) -> AsyncSaver | None:
    """Wrap the saver process as the background saver of a job."""
    if process is None:
        return None
    recipe = job.recipe
    tiers = TierSettings(recipe.checkpoint, recipe.run_dir, recipe.run.name)
    return AsyncSaver(process, job.runtime, job.store, recipe.checkpoint.retries, tiers)


class Saving:
    """Saves a job as its recipe says.

    Args:
        job: what is saved.
        tracker: is told of every save.
        integrity: compares copies before they are saved.
        background: writes while training goes on; None to write here.
        clock: seconds, monotonic.

    Attributes:
        longest: seconds that the longest save has taken, until it was durable or given up.
    """

    def __init__(
        self,
        job: Job,
        tracker: Tracker | OtherRank,
        integrity: Integrity,
        background: AsyncSaver | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._tracker, self._integrity = job, tracker, integrity
        self._background, self._clock = background, clock
        self._config = job.recipe.checkpoint
        self._prepared = False
        self._unheard = False  # whether a save was begun of which nothing is known yet
        self._stall: dict[str, float] = {}  # seconds that training stood still for it
        self._failures: list[SaveResult] = []  # in a row
        self.longest = 0.0
        local = self._config.local
        self._snapshots = SnapshotClock(local.every_seconds if local is not None else None, job.runtime.ranks, clock)
        self._snapshot_fails = False

    def ask(self) -> None:
        """Before a step: have the ranks agree on whether it is time for a snapshot. Waits for nobody."""
        self._snapshots.ask(busy=self._unheard)

    def after_step(self, result: StepResult, *, is_last: bool = False) -> None:
        """Save, or write a snapshot, if it is time. Collective.

        Args:
            result: of the step just done.
            is_last: whether no other follows, so that its state is saved in any case; ``at_end`` waits for it.

        Raises:
            LostError: the run's folder has gone.
            StorageError: so many saves in a row have failed as the recipe allows.
        """
        self._hear(wait=False)
        self._prepare()
        is_time = self._snapshots.is_time()
        due = is_last or any(self._job.step % every == 0 for every in _periods(self._config))
        if not due and not is_time:
            return
        enter_phase("checkpoint")
        begin = self._clock()
        self.settle()
        waited = self._clock() - begin
        self._refuse_more_failures()
        self._check(result)  # what is wrong with this state says which one before it is good
        self._save(begin, waited, snapshot=not due)
        self._refuse_more_failures()
        self._snapshots.restart()
        enter_phase("between")

    def settle(self) -> None:
        """Wait until the save begun last is durable or has failed, the same on every rank. Collective."""
        if self._background is None:
            return
        self._hear(wait=True)
        settled = self._background.agree_on_outcome()
        if settled.result is not None and self._unheard:  # this rank's saver went before it could tell
            self._conclude(settled.result)
        if settled.lost:
            self._do_without_savers(settled)

    def at_end(self, result: StepResult | None) -> None:
        """Wait for the save of the last step, if there was a step at all and it was not undone. Collective.

        Raises:
            LostError: the run's folder has gone.
            StorageError: the disk refused.
        """
        self._snapshots.is_time()  # nothing stays unanswered
        if result is None:
            return
        enter_phase("checkpoint")
        self.settle()
        if not self._is_saved():
            self._job.check_folder()
            raise StorageError(self._failures[-1].message)
        enter_phase("end")  # which may take any time: a store may be slow
        if self._background is not None:
            self._tell_all(self._background.finish_uploads())
        self._job.tiers.clear_snapshots()

    def _prepare(self) -> None:
        if not self._prepared and self._background is not None:  # not before the optimizer has its state
            self._background.prepare(self._job.content().chunks)
            self._prepared = True

    def _is_saved(self) -> bool:
        return self._job.saved is not None and self._job.saved.step == self._job.step

    def _check(self, result: StepResult) -> None:
        self._job.check_folder()
        check_numbers(self._job, result)
        self._integrity.before_save()

    def _save(self, begin: float, waited: float, snapshot: bool = False) -> None:
        content = self._job.content()
        if self._background is None:
            self._save_here(content, snapshot)
            return
        self._background.submit(content, snapshot)
        self._unheard = True
        self._stall = {"stall_seconds": self._clock() - begin, "waited_seconds": waited}

    def _save_here(self, content: CheckpointContent, snapshot: bool = False) -> None:
        result: SaveResult | SnapshotResult
        if snapshot:
            result = self._job.tiers.snapshot(content)
        else:
            result = save_with_retries(self._job.store, content, self._config.retries, self._tell_refusal)
        self._stall = {"stall_seconds": result.seconds, "waited_seconds": 0.0}
        self._conclude(result)
        if isinstance(result, SaveResult) and result.path is not None:
            tell_notes(self._job.tiers.upload(), self._tracker)

    def _hear(self, wait: bool) -> None:
        if self._background is not None:
            self._tell_all(self._background.reports(wait))

    def _tell_all(self, notes: Iterator[SaverReport]) -> None:
        for note in notes:
            if isinstance(note, FailedAttempt):
                self._tell_refusal(note)
            elif isinstance(note, TierEvent):
                tell_notes([note], self._tracker)
            else:
                self._conclude(note)

    def _do_without_savers(self, settled: SaveOutcome) -> None:
        assert self._background is not None, "its savers have gone"
        self._job.runtime.ranks.run_on_all(self._background.kill)
        self._background = None
        for rank, reason in settled.lost.items():
            self._tell("saver_lost", f"the saver of rank {rank} has gone: {reason}", rank=rank, message=reason)
        self._tracker.message("checkpoints are written by the ranks themselves from here on: training waits for them")
        self._job.store.clean_up()
        if settled.pending is not None:
            self._save_here(settled.pending)

    def _conclude(self, result: SaveResult | SnapshotResult) -> None:
        self._unheard = False
        self.longest = max(self.longest, result.seconds)
        step = result.step
        if isinstance(result, SnapshotResult):
            self._conclude_snapshot(result)
            return
        if result.path is None:
            self._failures.append(result)
            text = f"checkpoint of step {step} failed, training goes on: {result.message}"
            self._tell("checkpoint_failed", text, step=step, message=result.message, tries=result.attempts)
            return
        self._failures = []
        self._job.saved = Saved(step, result.path)
        secured(step)
        fields = {"seconds": result.seconds, **self._stall, "tries": result.attempts}
        self._tracker.event("checkpoint", step=step, path=str(result.path), **fields)
        if result.message:
            text = f"checkpoint of step {step} is saved, but {result.message}"
            self._tell("checkpoint_prune_failed", text, step=step, message=result.message)

    def _conclude_snapshot(self, result: SnapshotResult) -> None:
        failed, before = result.name is None, self._snapshot_fails
        self._snapshot_fails = failed
        if not failed:
            secured(result.step)
            kind, fields = "snapshot", {"name": result.name, "seconds": result.seconds, **self._stall}
        else:
            kind, fields = "snapshot_failed", {"message": result.message}
        with suppress(StorageError):
            self._tracker.event(kind, step=result.step, **fields)
        if failed and not before:  # a folder that is full stays so for many of them
            self._tracker.message(f"snapshot of step {result.step} failed, training goes on: {result.message}")

    def _tell_refusal(self, refusal: FailedAttempt) -> None:
        text = f"checkpoint of step {refusal.step}: try {refusal.attempts} failed, trying again: {refusal.message}"
        self._tell("checkpoint_retry", text, step=refusal.step, message=refusal.message, tries=refusal.attempts)

    def _tell(self, kind: str, text: str, **fields: Any) -> None:
        with suppress(StorageError):  # the disk that refused the checkpoint may refuse the event too
            self._tracker.event(kind, **fields)
        self._tracker.message(text)

    def _refuse_more_failures(self) -> None:
        count = len(self._failures)
        if count < self._config.failures:
            return
        saved = self._job.saved
        good = f"The newest checkpoint is {saved.path}." if saved is not None else "There is no checkpoint."
        raise StorageError(
            f"{count} saves in a row have failed, as many as checkpoint.failures allows; the last one, of step "
            f"{self._failures[-1].step}: {self._failures[-1].message} {good}"
        )


def _periods(config: CheckpointConfig) -> list[int]:
    """Steps between two checkpoints, by each rule of the recipe that asks for some."""
    return [every for every in (config.every_steps, config.keep_every_steps) if every is not None]
