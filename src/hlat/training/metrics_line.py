"""Lines of metrics.jsonl, written after the step's checkpoint, so that a failure after the save loses nothing.

    step -> collect -> its metrics -> saved in the checkpoint -> write -> evaluation, line in metrics.jsonl
    resume at a step whose line is missing -> write_missing -> saved metrics, evaluation, line

Evaluation may run out of memory or time, and writing the line may fail. The state of the step is durable before both.
An evaluation that fails is reported and left out; one that ends the process is left out by the next attempt.
"""

from typing import Any

from hlat.runtime.errors import NumericsError
from hlat.runtime.process.phase import enter_phase
from hlat.tracking import OtherRankTracker, Tracker, append_samples
from hlat.training.components.base import StepEnd, TrainingComponent
from hlat.training.divergence import check_values
from hlat.training.process.phase_timer import PhaseTimer
from hlat.training.run_state import RunState
from hlat.training.step import StepResult
from hlat.training.step_metrics import reproducible_metrics, timing_metrics
from hlat.training.validation.attempts import EvaluationAttempts
from hlat.training.validation.evaluation import EvaluationResult
from hlat.training.validation.losses import ValidationResult


class MetricsLines(TrainingComponent):
    """Writer of the lines of a run: evaluates, if the step does, and writes the line that was collected before.

    Args:
        state: the run; its ``unwritten_metrics`` are those of a line that is not written yet.
        tracker: receives the lines.
        timer: measures the seconds per phase between two lines.

    Attributes:
        validation: result on the validation split of the last step, if that step evaluated.
    """

    def __init__(self, state: RunState, tracker: Tracker | OtherRankTracker, timer: PhaseTimer) -> None:
        self._state, self._tracker, self._timer = state, tracker, timer
        self._tokens_before = state.tokens  # at the last line, or where this process started from
        self._attempts = EvaluationAttempts(state.recipe.run_dir)
        self.validation: ValidationResult | None = None

    def write_missing(self) -> None:
        """Write the line of the resumed step, if the checkpoint has its metrics and the file does not. Collective.

        This process did not time that step, so the line has no times.
        """
        state, tracker = self._state, self._tracker
        metrics, state.unwritten_metrics = state.unwritten_metrics, None
        if metrics is None or not self._is_due():
            return
        if state.runtime.ranks.run_on_rank0(lambda: isinstance(tracker, Tracker) and tracker.ends_before(state.step)):
            self.validation = self._write(metrics)

    def collect(self, result: StepResult) -> None:
        """Collect the metrics of the step just done, if it is logged, to be saved in its checkpoint. Collective.

        Raises:
            NumericsError: loss, gradient norm or weights are not finite; the line is written first, without evaluation.
        """
        state = self._state
        metrics = state.unwritten_metrics = reproducible_metrics(state, result) if self._is_due() else None
        if metrics is None:
            return
        try:
            values = (metrics[name] for name in ("loss", "grad_norm", "param_norm"))
            check_values(state, result.verdict.applied, *values)
        except NumericsError:
            self._log(metrics | self._times())
            raise

    def after_step(self, end: StepEnd) -> None:
        """Evaluate, if this step does, and write the collected line. Collective.

        Raises:
            StateLostError: the run's folder is gone.
            StorageError: the line cannot be written.
        """
        metrics, self._state.unwritten_metrics = self._state.unwritten_metrics, None
        self.validation = None if metrics is None else self._write(metrics, timed=True)

    def after_rollback(self, step: int) -> None:
        """Drop the collected line and start timing anew."""
        self._state.unwritten_metrics, self._tokens_before, self.validation = None, self._state.tokens, None
        self._timer.reset()

    def _write(self, metrics: dict[str, Any], *, timed: bool = False) -> ValidationResult | None:
        result = self._evaluate() if self._evaluates() else None
        line = metrics | (self._times() if timed else {})
        self._log(line | (result.columns() if result is not None else {}))
        if result is None:
            return None
        if result.samples and self._state.runtime.ranks.is_first:
            append_samples(self._state.recipe.run_dir, self._state.step, result.samples)
        return result.validation

    def _times(self) -> dict[str, Any]:
        tokens, self._tokens_before = self._state.tokens - self._tokens_before, self._state.tokens
        return timing_metrics(self._state, tokens, self._timer)

    def _log(self, line: dict[str, Any]) -> None:
        if self._state.runtime.ranks.is_first:
            self._state.folder.check()  # the open file may belong to a folder that was removed
        self._tracker.log(line)

    def _is_due(self) -> bool:
        return self._evaluates() or self._due(self._state.recipe.training.log_every)

    def _evaluates(self) -> bool:
        settings = self._state.recipe.evaluation
        return bool(self._state.evaluation) and (self._due(settings.every_steps) or self._passed(settings.every_tokens))

    def _due(self, every: int | None) -> bool:
        step = self._state.step
        return step == self._state.recipe.total_steps or (every is not None and step % every == 0)

    def _passed(self, tokens: int | None) -> bool:
        """True if the last step reached or passed a multiple of so many training tokens."""
        if tokens is None:
            return False
        batches, length, step = self._state.recipe.batches, self._state.recipe.data.sequence_length, self._state.step
        return batches.first_of(step) * length // tokens > batches.first_of(step - 1) * length // tokens

    def _evaluate(self) -> EvaluationResult | None:
        """Evaluate the weights; None if that failed, now or in an earlier attempt. Collective."""
        state, ranks = self._state, self._state.runtime.ranks
        refusal = ranks.run_on_rank0(lambda: self._attempts.refusal(state.step))
        if refusal:
            self._tracker.message(refusal)
            return None
        ranks.run_on_rank0(lambda: self._attempts.begin(state.step))
        enter_phase("evaluation")
        result, failure = None, ""
        try:
            result = state.evaluation.run(state.model)
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
        """Collect the metrics of the step. Collective."""
        self._lines.collect(end.result)
