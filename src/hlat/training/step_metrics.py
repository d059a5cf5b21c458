"""Metrics of a step: computed, checked, and written to metrics.jsonl after the step's checkpoint.

    verdict on a step -> report_anomaly -> event and message; NumericsError if the action is "stop"
    weights           -> check_finite   -> NumericsError if they are not finite

    step -> collect -> its metrics -> saved in the checkpoint -> write -> evaluation, line in metrics.jsonl
    resume at a step whose line is missing -> write_missing -> saved metrics, evaluation, line

Some metrics are alike on any machine; those of time and memory are not. The run stops before it overwrites the last
good checkpoint.

The line is written after the save, so that a failure after the save loses nothing: evaluation may run out of memory or
time, and writing the line may fail. The state of the step is durable before both. An evaluation that fails is reported
and left out; one that ends the process is left out by the next attempt.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch

from hlat.config import Recipe
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.host_collectives import AsyncMax
from hlat.runtime.errors import NumericsError
from hlat.runtime.progress import enter_phase
from hlat.tracking import OtherRankTracker, Tracker, append_samples
from hlat.training.components import StepEnd, StepResult, TrainingComponent
from hlat.training.run_state import RunState
from hlat.training.validation.evaluation import EvaluationAttempts, EvaluationResult
from hlat.training.validation.losses import ValidationResult


def reproducible_metrics(state: RunState, result: StepResult) -> dict[str, Any]:
    """Return the step's metrics that are the same on any machine: values and position in the data. Collective."""
    # Waits for the device once. The norm is that after the update, so times read afterwards are those of finished
    # steps.
    norm = state.model.parameter_norm()
    enter_phase("device")
    loss, gradient_norm, parameter_norm = torch.stack((result.loss, result.gradient_norm, norm)).tolist()
    enter_phase("between")
    return {
        "step": state.step,
        "tokens": state.tokens,
        "samples": state.samples,
        "batch_crc32": batch_crc32(state),
        "loss": loss,
        "grad_norm": gradient_norm,
        "param_norm": parameter_norm,
        "lr": result.learning_rate,
    }


TRAINING_PHASES = ("data", "forward", "backward", "reduce", "optimizer", "device")


def timing_metrics(state: RunState, tokens: int, memory: dict[str, int], seconds: dict[str, float]) -> dict[str, Any]:
    """Return the metrics of machine and time since the last line, given those of memory and seconds of each phase."""
    # Training steps only, without evaluation and checkpoints.
    rate = tokens / sum(seconds.get(phase, 0.0) for phase in TRAINING_PHASES)
    return {
        "tokens_per_second": rate,
        **state.utilization(rate),
        **memory,
        "seconds": seconds,
    }


def batch_crc32(state: RunState) -> int:
    """Return the sum of the CRC-32 of the last global batch's sequences, modulo 2^32. Collective."""
    local = 0
    if state.last_batch is not None and state.model.is_model_parallel_leader:
        # A sum, because it does not depend on which rank has which rows.
        local = sum(zlib.crc32(row.tobytes()) for row in state.last_batch.inputs_BS.numpy())
    return int(state.runtime.ranks.all_reduce_sum(torch.tensor([local], dtype=torch.int64)).item()) & 0xFFFFFFFF


def _memory_metrics(state: RunState) -> dict[str, int]:
    """Return the peak memory of the rank that used most, and what its allocator had to reserve. Collective."""
    device, ranks = state.runtime.device, state.runtime.ranks
    backend = backend_of(device)
    found, use = {"memory_bytes": backend.peak_memory_bytes(device)}, backend.allocator_use(device)
    if use is not None:
        found |= {"memory_reserved_bytes": use.reserved, "memory_retries": use.retries}
    maximum = AsyncMax(ranks)

    def most(value: int) -> int:
        maximum.start(value)
        return maximum.result()

    return {name: most(value) for name, value in found.items()}


_ACTIONS = {"warn": "applied", "skip": "not applied", "rollback": "rolling back to the last checkpoint"}


def report_anomaly(state: RunState, result: StepResult, tracker: Tracker | OtherRankTracker) -> None:
    """Record the step's anomaly, if any; raises NumericsError if the verdict is to stop. Collective."""
    verdict = result.verdict
    if verdict.samples is None:
        return
    loss, norm, clip = float(result.loss), float(result.gradient_norm), state.recipe.optimizer.clip_norm
    tracker.event(
        "anomaly",
        step=state.step,
        kind=verdict.kind,
        action=verdict.action,
        samples=list(verdict.samples),
        batch_crc32=batch_crc32(state),
        loss=loss,
        grad_norm=norm,
        clip_norm=clip,
        window=dict(verdict.window),
        reason=verdict.reason,
    )
    text = f"step {state.step}: {verdict.reason}"
    if verdict.action == "stop":
        raise _diverged(state, text)
    clipped = "clipped and " if verdict.action == "warn" and clip is not None and norm > clip else ""
    tracker.warn(f"{text}; {clipped}{_ACTIONS[verdict.action]}")


def check_finite(state: RunState, result: StepResult) -> None:
    """Raise NumericsError unless the weights, and the numbers of an applied update, are finite. Collective."""
    # Waits for the device, so it is called where that happens anyway. Every rank sees the same numbers and decides
    # alike.
    values = torch.stack((result.loss, result.gradient_norm, state.model.parameter_norm())).tolist()
    check_values(state, result.verdict.applied, *values)


def check_values(state: RunState, applied: bool, loss: float, gradient_norm: float, parameter_norm: float) -> None:
    """Raise NumericsError unless the norm of the weights, and the numbers of an applied update, are finite."""
    # A refused update may have an infinite loss: it changed nothing.
    if all(map(math.isfinite, (parameter_norm, *((loss, gradient_norm) if applied else ())))):
        return
    numbers = f"loss {loss}, gradient norm {gradient_norm}, parameter norm {parameter_norm}"
    raise _diverged(state, f"step {state.step}: {numbers}")


def _diverged(state: RunState, problem: str) -> NumericsError:
    recipe = state.recipe
    clip = "" if recipe.optimizer.clip_norm is not None else ", or optimizer.clip_norm=1.0"
    remedies = (
        f"Try an optimizer.lr well below {recipe.optimizer.lr:g} (usual are 1e-4 to 3e-3) or a schedule.warmup_steps "
        f"above {recipe.schedule.warmup_steps}{clip}"
    )
    if state.saved is None:
        good = f"No checkpoint has been written. {remedies}: the same command begins anew."
    else:
        command = f"hlat fork {recipe.run_dir}@{state.saved.step} --to NEW optimizer.lr=RATE"
        good = f"The last good state is {state.saved.path}. {remedies}, in a fork of the run from there: {command}."
    return NumericsError(f"{problem}: training has diverged. {good}")


def multiples_after(every: int | None, first: int, last: int) -> int:
    """Count the multiples of ``every`` after ``first``, up to ``last``."""
    return max(0, last // every - first // every) if every else 0


def evaluations_after(recipe: Recipe, step: int) -> int:
    """Count the evaluations that come after a step, the last step's included."""
    settings, before_last = recipe.evaluation, recipe.total_steps - 1
    tokens = [recipe.batches.tokens_before(each) for each in (step, before_last)]
    count = multiples_after(settings.every_steps, step, before_last), multiples_after(settings.every_tokens, *tokens)
    return min(max(count) + 1, recipe.total_steps - step)


class MetricsLines(TrainingComponent):
    """Evaluates, if the step does, and writes the line of metrics that was collected before the save."""

    def __init__(
        self,
        state: RunState,
        tracker: Tracker | OtherRankTracker,
        reset_timer: Callable[[], dict[str, float]],
        compare: Callable[[float], None] = lambda loss: None,
    ) -> None:
        self._state, self._tracker, self._reset_timer = state, tracker, reset_timer
        self._compare = compare  # gets each validation loss before its line is written
        self._tokens_before = state.tokens  # at the last line, or where this process started from
        self._has_evaluation = bool(state.evaluation)
        self._attempts = EvaluationAttempts(state.recipe.run_dir)
        self.validation: ValidationResult | None = None  # of the last step, if it evaluated
        self._has_mfu = True  # of the last line

    def write_missing(self) -> None:
        """Write the resumed step's line if the checkpoint has it and the file does not; without times. Collective."""
        state, tracker = self._state, self._tracker
        metrics, state.unwritten_metrics = state.unwritten_metrics, None
        if metrics is None or not self._is_due():
            return
        if state.runtime.ranks.run_on_rank0(lambda: isinstance(tracker, Tracker) and tracker.ends_before(state.step)):
            self.validation = self._write(metrics)

    def collect(self, result: StepResult) -> None:
        """Collect the step's metrics if it is logged; raises NumericsError if they are not finite. Collective."""
        state = self._state
        metrics = state.unwritten_metrics = reproducible_metrics(state, result) if self._is_due() else None
        if metrics is None:
            return
        try:
            values = (metrics[name] for name in ("loss", "grad_norm", "param_norm"))
            check_values(state, result.verdict.applied, *values)
        except NumericsError:
            # The line shows the user at which numbers the run diverged.
            self._log(metrics | self._times())
            raise

    def after_step(self, end: StepEnd) -> None:
        """Evaluate, if this step does, and write the collected line. Collective."""
        metrics, self._state.unwritten_metrics = self._state.unwritten_metrics, None
        self.validation = None if metrics is None else self._write(metrics, timed=True)

    def after_rollback(self, step: int) -> None:
        # The undone steps took time, which is not that of the tokens to come.
        self._state.unwritten_metrics, self._tokens_before, self.validation = None, self._state.tokens, None
        self._reset_timer()

    def _write(self, metrics: dict[str, Any], *, timed: bool = False) -> ValidationResult | None:
        result = self._evaluate() if self._evaluates() else None
        if result is not None and result.validation is not None:
            self._compare(result.validation.loss)
        line = metrics | (self._times() if timed else {})
        self._log(line | (result.columns() if result is not None else {}))
        if result is None:
            return None
        if result.samples and self._state.runtime.ranks.is_first:
            append_samples(self._state.recipe.run_dir, self._state.step, result.samples)
        return result.validation

    def _times(self) -> dict[str, Any]:
        tokens, self._tokens_before = self._state.tokens - self._tokens_before, self._state.tokens
        memory = _memory_metrics(self._state)  # before the timer begins anew: ranks wait for each other
        times = timing_metrics(self._state, tokens, memory, self._reset_timer())
        if "mfu" not in times and self._has_mfu and self._state.runtime.ranks.is_first:
            self._tracker.message("MFU is not known: the device's peak was measured beside other programs")
        self._has_mfu = "mfu" in times
        return times

    def _log(self, line: dict[str, Any]) -> None:
        if self._state.runtime.ranks.is_first:
            self._state.folder.check()  # the open file may belong to a folder that was removed
        self._tracker.log(line)

    def _is_due(self) -> bool:
        return self._evaluates() or self._due(self._state.recipe.training.log_every)

    def _evaluates(self) -> bool:
        settings = self._state.recipe.evaluation
        return self._has_evaluation and (self._due(settings.every_steps) or self._passed(settings.every_tokens))

    def _due(self, every: int | None) -> bool:
        step = self._state.step
        is_last = step == self._state.recipe.total_steps or self._state.leaves_stage
        return is_last or (every is not None and step % every == 0)

    def _passed(self, tokens: int | None) -> bool:
        if tokens is None:
            return False
        batches, step = self._state.recipe.batches, self._state.step
        # Steps rarely end on a multiple exactly: the first one at or past it counts.
        return batches.tokens_before(step) // tokens > batches.tokens_before(step - 1) // tokens

    def _evaluate(self) -> EvaluationResult | None:
        """Evaluate the weights; None if that failed, now or in an earlier attempt. Collective."""
        state, ranks = self._state, self._state.runtime.ranks
        refusal = ranks.run_on_rank0(lambda: self._attempts.refusal(state.step))
        if refusal:
            self._tracker.warn(refusal)
            return None
        ranks.run_on_rank0(lambda: self._attempts.begin(state.step))
        enter_phase("evaluation")
        result, failure = None, ""
        try:
            result = state.evaluation.run(state.model, self._tracker.progress)
        # A failure on one rank must not end the run: all ranks learn of it below, and go on.
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        enter_phase("between")
        failures = [found for found in ranks.all_gather(failure) if found]
        ranks.run_on_rank0(lambda: self._attempts.done(state.step))
        if not failures:
            return result
        self._report(failures[0])
        return None

    def _report(self, failure: str) -> None:
        step = self._state.step
        self._tracker.event("evaluation_failed", step=step, error=failure)
        self._tracker.warn(f"the evaluation of step {step} failed, training goes on: {failure}")


class MetricsCollection(TrainingComponent):
    """Collects the metrics of a logged step for ``MetricsLines`` before its save, so that the checkpoint has them."""

    def __init__(self, lines: MetricsLines) -> None:
        self._lines = lines

    def after_step(self, end: StepEnd) -> None:
        self._lines.collect(end.result)
