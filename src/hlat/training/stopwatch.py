"""Where the time of the steps between two log lines went."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TRAINING_PHASES = ("data", "forward_backward", "optimizer")


class Stopwatch:
    """Seconds per named phase since the last ``reset``."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of this block to phase ``name``."""
        begin = self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - begin

    @property
    def training_seconds(self) -> float:
        """Time spent on training steps, without validation and checkpoints."""
        return sum(self._seconds[name] for name in TRAINING_PHASES)

    def reset(self) -> dict[str, float]:
        """Seconds per phase, and start again from zero."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
