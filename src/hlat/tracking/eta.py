"""Estimate of the time left, from the pace of the last steps."""

from collections import deque
from collections.abc import Callable

from hlat.config import BatchSchedule

_WINDOW = 200  # marks, one a step; only recent ones count, because a run may slow down or speed up
EQUAL_STEPS = BatchSchedule(1)
"""Steps of one sample each, if the sizes of batches do not matter."""


class Eta:
    """Estimator of the time left, from the pace since the oldest of the recent marks.

    Steps before the first mark do not count: the first step of a process compiles, allocates and warms caches.
    Validation and checkpoints between marks count, because they will recur.

    Args:
        total_steps: number of steps of the run.
        clock: seconds, monotonic.
        batches: batches of the steps; a step is assumed to take time in proportion to its samples.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float], batches: BatchSchedule = EQUAL_STEPS) -> None:
        self._total, self._batches = total_steps, batches
        self._clock = clock
        self._marks: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def mark(self, step: int) -> float | None:
        """Record that ``step`` is done now; the first record of a step counts.

        Returns:
            Seconds left, or None while there is only one mark.
        """
        if not self._marks or step > self._marks[-1][0]:
            self._marks.append((step, self._clock()))
        (first_step, first_time), (_, now) = self._marks[0], self._marks[-1]
        if step >= self._total:
            return 0.0
        if step <= first_step:
            return None
        first, last, end = map(self._batches.first_of, (first_step, step, self._total))
        return (end - last) * (now - first_time) / (last - first)
