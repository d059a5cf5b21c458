"""Estimate of the time left, from the pace of the last steps."""

from collections import deque
from collections.abc import Callable

_WINDOW = 20  # marks; only recent ones count, because a run may slow down or speed up


class Eta:
    """Estimator of the time left, from the pace since the oldest of the recent marks.

    Steps before the first mark do not count: the first step of a process compiles, allocates and warms caches.
    Validation and checkpoints between marks count, because they will recur.

    Args:
        total_steps: number of steps of the run.
        clock: seconds, monotonic.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float]) -> None:
        self._total = total_steps
        self._clock = clock
        self._marks: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def mark(self, step: int) -> float | None:
        """Record that ``step`` is done now.

        Returns:
            Seconds left, or None while there is only one mark.
        """
        self._marks.append((step, self._clock()))
        (first_step, first_time), (_, now) = self._marks[0], self._marks[-1]
        if step >= self._total:
            return 0.0
        if step <= first_step:
            return None
        return (self._total - step) * (now - first_time) / (step - first_step)
