"""The line of metrics of a step, around the save of its state: what fails after the save costs nothing.

    step --begin--> its numbers --saved with its state--> validation --finish--> line in metrics.jsonl
    resume at a step whose line is missing --owed--> the numbers that were saved, validation --> line

Validation needs memory and time, and a disk may refuse the line: the state of the step is safe before either.
"""

from typing import Any

from hlat.runtime import NumericsError
from hlat.runtime.process import enter_phase
from hlat.tracking import OtherRank, Tracker
from hlat.training.divergence import check_numbers
from hlat.training.process import Stopwatch
from hlat.training.run_state import Job
from hlat.training.step import StepResult
from hlat.training.step_metrics import step_numbers, step_times
from hlat.training.validation import ValidationResult, validate


class Lines:
    """Writes the lines of a run.

    Args:
        job: whose steps are told; it keeps the numbers of a line that is not written yet.
        tracker: gets the lines.
        watch: measures the time between two of them.
    """

    def __init__(self, job: Job, tracker: Tracker | OtherRank, watch: Stopwatch) -> None:
        self._job, self._tracker, self._watch = job, tracker, watch
        self._last = job.step  # the step of the last line, or where this process began

    def owed(self) -> ValidationResult | None:
        """Write the line of the step that the run goes on from, if it was saved and never written. Collective.

        Of that step this process knows no times, so the line has none.

        Returns:
            What validation gave, where that step validates.
        """
        job, tracker = self._job, self._tracker
        numbers, job.numbers = job.numbers, None
        if numbers is None or not self._is_due():
            return None
        if not job.runtime.ranks.run_on_rank0(lambda: isinstance(tracker, Tracker) and tracker.lacks(job.step)):
            return None
        return self._write(numbers)

    def begin(self, result: StepResult) -> None:
        """Read the numbers of the step just done, if it gets a line, for its state to be saved with them. Collective.

        Raises:
            NumericsError: they are not finite; the line is written then, without validation.
        """
        job = self._job
        job.numbers = step_numbers(job, result) if self._is_due() else None
        if job.numbers is None:
            return
        try:
            check_numbers(job, result)
        except NumericsError:
            self._log(job.numbers | self._times())
            raise

    def finish(self) -> ValidationResult | None:
        """Validate, if it is time, and write the line. Collective.

        Raises:
            LostError: the run's folder has gone.
            StorageError: the line cannot be written.
        """
        numbers, self._job.numbers = self._job.numbers, None
        return None if numbers is None else self._write(numbers, timed=True)

    def go_back(self) -> None:
        """Forget the steps since that which the job is at now."""
        self._job.numbers, self._last = None, self._job.step
        self._watch.reset()

    def _write(self, numbers: dict[str, Any], *, timed: bool = False) -> ValidationResult | None:
        validation = self._validate() if self._validates() else None
        line = numbers | (self._times() if timed else {})
        if validation is not None:
            line |= {"val_loss": validation.loss, "val_bits_per_byte": validation.bits_per_byte}
        self._log(line)
        return validation

    def _times(self) -> dict[str, Any]:
        steps, self._last = self._job.step - self._last, self._job.step
        return step_times(self._job, steps, self._watch)

    def _log(self, line: dict[str, Any]) -> None:
        if self._job.runtime.ranks.is_first:
            self._job.folder.check()  # or the file that is open may be of a folder that was removed
        self._tracker.log(line)

    def _is_due(self) -> bool:
        return self._validates() or self._due(self._job.recipe.training.log_every)

    def _validates(self) -> bool:
        return self._job.validation_data is not None and self._due(self._job.recipe.evaluation.every_steps)

    def _due(self, every: int | None) -> bool:
        step = self._job.step
        return step == self._job.recipe.total_steps or (every is not None and step % every == 0)

    def _validate(self) -> ValidationResult:
        job = self._job
        assert job.validation_data is not None, "asked only where there is some"
        enter_phase("evaluation")
        result = validate(job.model, job.validation_data, job.recipe.batch.micro_batch)
        enter_phase("between")
        return result
