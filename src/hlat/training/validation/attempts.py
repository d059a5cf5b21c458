"""Record of evaluations that ended a run's processes, so that the next attempt leaves them out.

    begin(step) -> evaluation -> done(step)            evaluation.json names the step in between
    process killed, out of memory, hanging -> the next attempt finds the step in evaluation.json and leaves it out

Otherwise an evaluation that always fails would end every attempt at the same step.
"""

import json
from contextlib import suppress
from pathlib import Path

from hlat.data.stores import write_atomic

_MOST_FAILURES = 2
"""Number of unfinished evaluations in a row after which a run evaluates no more."""


class EvaluationAttempts:
    """Steps whose evaluation began and did not end, in the file ``evaluation.json`` of a run's folder.

    A disk that refuses the file does not stop the run: the file then protects from nothing.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "evaluation.json"
        self._unfinished: list[int] = []
        with suppress(OSError, ValueError, TypeError, KeyError):
            self._unfinished = [int(step) for step in json.loads(self._file.read_text(encoding="utf-8"))["unfinished"]]

    def refusal(self, step: int) -> str:
        """Explain why this step is not evaluated; empty if it is."""
        if len(self._unfinished) >= _MOST_FAILURES:
            steps = " and ".join(str(each) for each in self._unfinished)
            return (
                f"no evaluation: those of steps {steps} ended the run's processes. Use hlat evaluate on checkpoints, "
                f"or delete {self._file} to try again."
            )
        if step in self._unfinished:
            return f"no evaluation of step {step}: it ended the run's processes. Use hlat evaluate on a checkpoint."
        return ""

    def begin(self, step: int) -> None:
        """Record that an evaluation begins."""
        self._unfinished.append(step)
        self._write()

    def done(self, step: int) -> None:
        """Record that the evaluation of a step ended: those of earlier steps that did not are forgotten."""
        self._unfinished = [each for each in self._unfinished if each > step]
        self._write()

    def _write(self) -> None:
        with suppress(OSError):
            if self._unfinished:
                write_atomic(self._file, json.dumps({"unfinished": self._unfinished}).encode())
            else:
                self._file.unlink(missing_ok=True)
