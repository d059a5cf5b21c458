"""Record of evaluations that ended a run's processes, so that they are tried twice, and not for ever.

    begin(step) -> evaluation -> done(step)         evaluation.json counts the attempts in between
    process killed, out of memory, hanging -> the next attempt of the run evaluates the step again, the third does not

Otherwise an evaluation that always fails would end every attempt at the same step.
"""

import json
from contextlib import suppress
from pathlib import Path

from hlat.data import write_atomic

_TRIES = 2
"""Number of times that the evaluation of a step is begun."""
_MOST_FAILURES = 2
"""Number of steps in a row without an evaluation after which a run evaluates no more."""


class EvaluationAttempts:
    """Evaluations that began and did not end, by step, in the file ``evaluation.json`` of a run's folder.

    A disk that refuses the file does not stop the run: the file then protects from nothing.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "evaluation.json"
        self._unfinished: dict[int, int] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):  # a damaged file protects from nothing
            content = json.loads(self._file.read_text(encoding="utf-8"))
            self._unfinished = {int(step): int(count) for step, count in content["unfinished"].items()}

    def refusal(self, step: int) -> str:
        """Explain why this step is not evaluated; empty if it is."""
        failed = [str(each) for each, count in self._unfinished.items() if count >= _TRIES]
        if len(failed) >= _MOST_FAILURES:
            return (
                f"no evaluation: those of steps {' and '.join(failed)} ended the run's processes. Use hlat evaluate on "
                f"checkpoints, or delete {self._file} to try again."
            )
        if str(step) in failed:
            return f"no evaluation of step {step}: it ended the run's processes. Use hlat evaluate on a checkpoint."
        return ""

    def begin(self, step: int) -> None:
        """Record that an evaluation begins."""
        self._unfinished[step] = self._unfinished.get(step, 0) + 1
        self._write()

    def done(self, step: int) -> None:
        """Record that the evaluation of a step ended: those of earlier steps that did not are forgotten."""
        self._unfinished = {each: count for each, count in self._unfinished.items() if each > step}
        self._write()

    def _write(self) -> None:
        with suppress(OSError):
            if self._unfinished:
                write_atomic(self._file, json.dumps({"unfinished": self._unfinished}).encode())
            else:
                self._file.unlink(missing_ok=True)
