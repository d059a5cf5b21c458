"""How long the rest of the run will take, judging by how long its last steps took."""

from collections import deque
from collections.abc import Callable

_WINDOW = 20  # marks; the pace of the last ones counts, because a run may slow down or speed up


class Eta:
    """Time left, from the pace since the earliest recent mark.

    Only steps of this process count, and not those before the first mark: the first step of a process compiles,
    allocates and warms caches. Validation and checkpoints between marks count, because they will come again.

    Args:
        total_steps: steps of the whole run.
        clock: seconds, monotonic.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float]) -> None:
        self._total = total_steps
        self._clock = clock
        self._marks: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def mark(self, step: int) -> float | None:
        """Note that ``step`` is done now.

        Returns:
            Seconds left, or None while there is only one mark to judge by.
        """
        self._marks.append((step, self._clock()))
        (first_step, first_time), (_, now) = self._marks[0], self._marks[-1]
        if step >= self._total:
            return 0.0
        if step <= first_step:
            return None
        return (self._total - step) * (now - first_time) / (step - first_step)
