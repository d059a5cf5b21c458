"""The training loop: a run from its lock to its last checkpoint, in order.

lock the run folder -> build or resume -> announce -> components begin
    -> [ batch -> forward and backward -> anomaly check -> clip -> optimizer -> components -> stop? ] -> components end
                                               |-> roll back to a checkpoint

    a step: this rank's sequences -> micro-batches -> forward, summed loss / tokens of the global batch, backward
                          -> loss and gradient norm over all ranks -> verdict -> clip -> learning rate -> optimizer

Every micro-batch of every rank divides its loss by the tokens of the global batch. So gradient accumulation and data
parallelism give exactly the gradient of the global batch, up to the order of additions, even if micro-batches have
different numbers of labels.

The verdict is computed on the host, which reads loss and norm: one device synchronization in each step. A rejected
update is not applied at all; it is never multiplied by zero, because zero times NaN is NaN.

Everything else that happens in a step is a component (``hlat.training.components``): saving, validation and metrics
among them. ``_components`` lists them in the order in which they are called.
"""

import gc
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

from hlat.checkpoint import AsyncSaver
from hlat.config import Recipe, refuse_faults
from hlat.data import Batch
from hlat.optim import Optimizer, rate_at
from hlat.parallel import ParallelModel, decide_compilation
from hlat.resilience import APPLY, StepVerdict, Watchdog, record_run_id, set_step_counter
from hlat.runtime.backend.faults import collect_dumps
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import Runtime, joined_run
from hlat.runtime.errors import HlatError, StorageError
from hlat.runtime.logs import log_path, rank_log
from hlat.runtime.process import rank_info
from hlat.runtime.progress import enter_phase, enter_stage, observe_phases
from hlat.runtime.storage.run_folder import EarlierAttempt, RunFolder, hold_run_folder, open_run_folder
from hlat.tracking import LAST_SAVE, OtherRankTracker, Tracker, check_installed, open_tracker
from hlat.training.batches import BatchPrefetcher
from hlat.training.components import ComponentList, LoopStart, StepEnd, StepResult, TrainingComponent
from hlat.training.interruptions import Deadline, StopRequest, explained_out_of_memory
from hlat.training.numerics import configure_rounding
from hlat.training.optional_components import StepObserver
from hlat.training.part_checks import check_own_parts
from hlat.training.process import FaultInjection, GarbageCollector, Profiler
from hlat.training.run_data import DataProgress
from hlat.training.run_state import RunState, build_run_state
from hlat.training.saving.checkpointing import Checkpointer, background_saver, roll_back, saver_process, saves_after
from hlat.training.saving.corruption_check import CorruptionCheck
from hlat.training.saving.exports import WeightExports
from hlat.training.saving.forecast_comparison import ForecastComparison
from hlat.training.start import RunOrigin, announce, has_begun, record_attempt, record_early_failure, run_lock
from hlat.training.step_metrics import MetricsCollection, MetricsLines, evaluations_after, report_anomaly
from hlat.training.validation.losses import ValidationResult

NEXT_STAGE = "stage"
"""Why the steps of a stage end, of which others follow."""


@dataclass(frozen=True)
class Outcome:
    """Result of one call of ``run``."""

    step: int
    total_steps: int
    reason: str  # "finished", "stop_after", "deadline", or the name of the signal that requested the stop
    checkpoint: Path | None  # newest checkpoint; None if the run was stopped before its first step
    validation: ValidationResult | None  # of the last step, if that step validated

    @property
    def finished(self) -> bool:
        """True if all steps of the recipe are done, not only those of this call."""
        return self.step >= self.total_steps


def run(
    recipe: Recipe,
    *,
    stream: TextIO | None = None,
    data_progress: DataProgress = nullcontext,
    profile: bool = False,
    allow_faults: bool = False,
    require_step: int | None = None,
    earlier: EarlierAttempt | None = None,
    origin: RunOrigin | None = None,
    on_step: Sequence[Callable[[StepEnd], object]] = (),
) -> Outcome:
    """Train a recipe, starting from the newest valid checkpoint in its run directory if there is one.

    Every process of a run calls this. Rank and world size are read from the environment (torchrun,
    ``hlat train --nproc``).

    Args:
        recipe: with all of its rules checked.
        stream: output of the console; standard output if None.
        data_progress: opens a progress display while text is prepared.
        profile: write a trace of steps 4 to 6 of each rank, and a table, to <run.dir>/profile.
        allow_faults: inject the faults listed in the recipe. If False, a recipe that lists any is refused.
        require_step: resume from this step; fail unless it is the newest checkpoint.
        earlier: run id and durable step of the previous attempt; fail if its folder or that state is gone.
        origin: file, text and overrides of the recipe, for the record; None for a recipe that a program has made.
        on_step: functions that are called after each step.

    Raises:
        HlatError: the run cannot start or continue; the message says why and what would work.
    """
    enter_phase("start")  # an earlier run of this process may have ended in another one
    refuse_faults(recipe.faults, allow_faults)
    this_rank = rank_info()
    # Before anything is written: a part that cannot be imported is a mistake in the recipe.
    check_own_parts(recipe, this_rank.world)
    if this_rank.rank == 0:
        check_installed(recipe.tracking)
    open_run_folder(recipe.run_dir, earlier)
    if this_rank.world > 1:
        enter_stage(f"joining {this_rank.world} processes")
    with (
        rank_log(recipe.run_dir, this_rank.rank, this_rank.world),
        saver_process(recipe, this_rank) as saver,  # first: a fork is safe only before threads and drivers start
        ExitStack() as stack,
    ):
        configure_rounding(recipe, this_rank)
        runtime = stack.enter_context(
            joined_run(
                recipe.run.device,
                recipe.run.determinism is not False,
                recipe.run_dir,
                recipe.run.compile_cache,
                Watchdog(recipe.recovery.hang_seconds).collective_limits(
                    log_path(recipe.run_dir, this_rank.rank).parent
                ),
            )
        )
        folder = _lock_run_folder(stack, recipe, runtime, stream)
        open_run_folder(recipe.run_dir, earlier)  # again: the folder may have changed while waiting for the lock
        background: AsyncSaver | None = None
        last_step: int | None = None
        while True:
            is_first = last_step is None
            attempt = partial(record_attempt, recipe, runtime, origin) if is_first else lambda: None
            state = _build(recipe, runtime, folder, data_progress, require_step, earlier, attempt)
            if last_step is None:
                last_step = _last_step(state)
                background = background_saver(saver, state)
                if background is not None:
                    stack.callback(background.close)
            with _open_tracker(state, stream) as tracker:
                announce(state, tracker, first=is_first)
                outcome, background = _run_stage(state, tracker, profile, background, last_step, on_step)
            if outcome.reason != NEXT_STAGE:
                return outcome
            # The next stage begins as a resumed run does, and in the memory of this one.
            del state
            gc.collect()
            earlier, require_step = None, None


def _last_step(state: RunState) -> int:
    """Return the step after which this process ends."""
    total, after = state.recipe.total_steps, state.recipe.training.stop_after
    return min(total, state.step + after) if after else total


def _run_stage(
    state: RunState,
    tracker: Tracker | OtherRankTracker,
    profile: bool,
    background: AsyncSaver | None,
    last_step: int,
    on_step: Sequence[Callable[[StepEnd], object]],
) -> tuple[Outcome, AsyncSaver | None]:
    """Train to the end of the run or of its stage; return how it ended, and the saver if it is not lost."""
    checkpointer = Checkpointer(state, tracker, CorruptionCheck(state, tracker), background)
    first_step = state.step
    try:
        with explained_out_of_memory(state.recipe, state.runtime, lambda: state.step - first_step):
            outcome = _train(state, tracker, profile, checkpointer, last_step, on_step)
    except HlatError as error:
        with suppress(StorageError):  # the error may be about this very disk
            tracker.event("error", step=state.step, message=str(error))
        raise
    return outcome, checkpointer.background


def _build(
    recipe: Recipe,
    runtime: Runtime,
    folder: RunFolder,
    data_progress: DataProgress,
    require_step: int | None,
    earlier: EarlierAttempt | None,
    record: Callable[[], None],
) -> RunState:
    """Build the run; record this attempt, by ``record``, or why it failed. Collective."""
    ranks = runtime.ranks
    resumes = ranks.run_on_rank0(lambda: has_begun(recipe.run_dir))
    # A new run is recorded before data is prepared, so that one that dies early leaves its recipe. One that goes on is
    # recorded once it is accepted.
    if not resumes:
        ranks.run_on_rank0(record)
    try:
        with explained_out_of_memory(recipe, runtime, lambda: 0):
            state = build_run_state(recipe, runtime, folder, data_progress, require_step, earlier)
    except HlatError as error:
        if ranks.is_first:
            record_early_failure(recipe, error)
        raise
    if resumes:
        ranks.run_on_rank0(record)
    if folder.run_id is not None:
        record_run_id(folder.run_id)
    return state


def _lock_run_folder(stack: ExitStack, recipe: Recipe, runtime: Runtime, stream: TextIO | None) -> RunFolder:
    """Lock the run's folder on rank 0 and open it on every rank, until the stack closes. Collective."""
    locks: list[int] = []
    runtime.ranks.run_on_rank0(lambda: locks.append(_take_lock(stack, recipe, stream)))
    lock = locks[0] if locks else None
    return runtime.ranks.run_on_all(
        lambda: stack.enter_context(hold_run_folder(recipe.run_dir, lock, runtime.ranks.rank))
    )


def _take_lock(stack: ExitStack, recipe: Recipe, stream: TextIO | None) -> int:
    lock = stack.enter_context(run_lock(recipe.run_dir, partial(print, file=stream, flush=True)))
    collect_dumps(log_path(recipe.run_dir, 0).parent)  # of earlier attempts: the next incident's are of this one only
    return lock


def _open_tracker(state: RunState, stream: TextIO | None) -> Tracker | OtherRankTracker:
    # One writer of the record; messages of the other ranks go to their logs.
    if not state.runtime.ranks.is_first:
        return OtherRankTracker()
    recipe = state.recipe
    return open_tracker(
        recipe.run_dir,
        recipe.tracking,
        total_steps=recipe.total_steps,
        start_step=state.step,
        batches=recipe.batches,
        breaks={
            "validation": partial(evaluations_after, recipe) if state.evaluation else lambda step: 0,
            "saving": partial(saves_after, recipe),
            LAST_SAVE: lambda step: 1,
        },
        stream=stream,
        name=recipe.run.name,
        recipe=state.run_recipe.model_dump(mode="json"),
    )


def _train(
    state: RunState,
    tracker: Tracker | OtherRankTracker,
    profile: bool,
    checkpointer: Checkpointer,
    last_step: int,
    on_step: Sequence[Callable[[StepEnd], object]],
) -> Outcome:
    recipe = state.recipe
    result, stop_reason = None, None

    def on_signal(name: str) -> None:
        tracker.message(f"{name}: stopping after this step; a second signal stops at once")

    with ExitStack() as stack:
        timer = PhaseTimer()
        stack.enter_context(observe_phases(timer))
        deadline = Deadline(recipe.recovery, lambda: checkpointer.longest_save)
        stop = stack.enter_context(StopRequest(state.runtime.ranks, on_signal, lambda: deadline.has_passed))
        set_step_counter(lambda: state.step)
        prefetcher = stack.enter_context(_open_prefetcher(state, tracker))
        forecast = [ForecastComparison(state, tracker)] if recipe.run.ladder is not None else []
        metrics_lines = MetricsLines(state, tracker, timer.reset, *(each.compare for each in forecast))
        observers = [StepObserver(observe) for observe in on_step]
        listed = _components(state, tracker, metrics_lines, checkpointer, profile)
        components = ComponentList([*listed, *forecast, *observers])
        components.begin(LoopStart(recipe, state.runtime, state.step, tracker, stack))
        metrics_lines.write_missing()
        compiles = decide_compilation(recipe, state.runtime.device, state.runtime.world).on
        if state.step < last_step:
            enter_stage("compiling, first step" if compiles else "first step")
        while state.step < last_step and stop_reason is None:
            # Overlaps with the step: the answer is there when it ends.
            stop.start_vote()
            components.before_step()
            tokens = state.tokens
            result = _training_step(state, prefetcher)
            if result.verdict.action in ("rollback", "stop"):
                checkpointer.wait_for_save()  # the pending save may become the newest good state
            report_anomaly(state, result, tracker)
            if result.verdict.action == "rollback":
                roll_back(state, prefetcher, tracker)
                components.after_rollback(state.step)
                # Also after a rollback: the vote of this step has to be completed on every rank.
                result, stop_reason = None, stop.vote_result() or (NEXT_STAGE if state.leaves_stage else None)
                continue
            stop_reason = stop.vote_result() or (NEXT_STAGE if state.leaves_stage else None)
            is_last = state.step == last_step or stop_reason is not None
            components.after_step(StepEnd(state.step, result, is_last))
            enter_stage("")
            tracker.step_done(state.step, result.loss_read, state.tokens - tokens)
        components.at_end(result)
        for note in state.data_notes_at_end():  # after the save: a difference may be found as late as this
            tracker.message(f"data: {note}")
        if stop_reason == NEXT_STAGE and state.step < last_step:
            stop_reason = stop.late_vote() or NEXT_STAGE
        enter_phase("end")

    reason = _end_reason(state, last_step, stop_reason)
    if reason != NEXT_STAGE:
        tracker.event("end", step=state.step, reason=reason)
    checkpoint = state.saved.path if state.saved is not None else None
    return Outcome(state.step, recipe.total_steps, reason, checkpoint, metrics_lines.validation)


def _end_reason(state: RunState, last_step: int, stop_reason: str | None) -> str:
    if state.step >= state.recipe.total_steps:
        return "finished"
    if stop_reason is None or (stop_reason == NEXT_STAGE and state.step >= last_step):
        return "stop_after"
    return stop_reason


def _components(
    state: RunState, tracker: Tracker | OtherRankTracker, lines: MetricsLines, checkpointer: Checkpointer, profile: bool
) -> list[TrainingComponent]:
    """List what the recipe asks for, in the order in which it is called before and after each step."""
    check = checkpointer.corruption_check
    return [
        *([FaultInjection(state)] if state.recipe.faults else []),
        *state.components,  # before the save: it has their state
        *([check] if check.compares else []),
        MetricsCollection(lines),
        checkpointer,
        *([WeightExports(state, tracker)] if state.recipe.checkpoint.export is not None else []),  # of what is durable
        lines,  # after the save: validation and the line may fail, and then the step is durable
        *([Profiler()] if profile else []),
        GarbageCollector(),
    ]


def _open_prefetcher(state: RunState, tracker: Tracker | OtherRankTracker) -> BatchPrefetcher:
    pinned = backend_of(state.runtime.device).pins_memory
    reader = state.training_data.reader(state.model, state.samples)
    return BatchPrefetcher(reader, state.recipe.batches, pinned, lambda note: tracker.message(f"data: {note}"))


def _training_step(state: RunState, prefetcher: BatchPrefetcher) -> StepResult:
    enter_phase("data")
    skipped = state.anomalies.skipped
    for first_sample in skipped.skipped_after(state.step):  # read and dropped: online streams have to move past them
        state.training_data.advance(prefetcher.next_batch(first_sample).progress)
    samples = skipped.next_step_start(state.step)
    local_batch = prefetcher.next_batch(samples)
    loss = accumulate_gradients(state.model, local_batch.batch)

    def check(loss: float, norm: float) -> StepVerdict:
        return state.anomalies.check(state.step + 1, samples, loss, norm)

    # Stages and their schedules are counted in batches, of which an anomaly may have skipped some.
    scheduled = state.step if state.recipe.place is None else state.next_batch
    result = update(state.model, state.optimizer, state.recipe, scheduled + 1, loss, check)
    enter_phase("between")
    # After the update: if the step fails, a restart reads its samples again.
    state.training_data.advance(local_batch.progress)
    state.last_batch = local_batch.batch
    state.step += 1
    return result


StepCheck = Callable[[float, float], StepVerdict]
"""Function from loss and gradient norm of a step to its verdict; it returns the same on every rank."""


def accumulate_gradients(model: ParallelModel, batch: Batch) -> torch.Tensor:
    """Add the gradient of the global batch's mean loss to ``.grad``; return this rank's term of the loss."""
    return model.accumulate_gradients(batch.inputs_BS, batch.labels_BS, batch.positions_BS)


def update(
    model: ParallelModel,
    optimizer: Optimizer,
    recipe: Recipe,
    step: int,
    loss: torch.Tensor,
    check: StepCheck | None = None,
) -> StepResult:
    """Reduce loss and gradients over all ranks, and update the weights if the verdict applies the update. Collective.

    ``step`` counts from 1, ``loss`` is the result of ``accumulate_gradients``. Without ``check``, the update is always
    applied, and the device is not waited for.
    """
    enter_phase("reduce")
    loss, norm = model.reduce_loss_and_norm(loss)
    verdict, loss_read = APPLY, math.nan
    if check is not None:
        enter_phase("device")
        loss_read, norm_read = torch.stack((loss, norm)).tolist()
        verdict = check(loss_read, norm_read)
    enter_phase("optimizer")
    rate = rate_at(recipe, step)
    if verdict.applied:
        if recipe.optimizer.clip_norm is not None:
            optimizer.clip_gradients(norm, recipe.optimizer.clip_norm)
        optimizer.set_learning_rate(rate)
        optimizer.step()
    # None instead of zeros: frees the memory, and backward writes gradients without reading them.
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, norm, rate, verdict, loss_read)


class PhaseTimer:
    """Seconds per named phase since the last ``reset``; a phase lasts until the next one begins."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._phase, self._since = "between", clock()

    def __call__(self, phase: str) -> None:
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def reset(self) -> dict[str, float]:
        """Return the seconds per phase, and start again from zero."""
        self(self._phase)
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
