"""Timer of the phases of training steps, between two log lines."""

import time
from collections import defaultdict
from collections.abc import Callable

TRAINING_PHASES = ("data", "forward", "backward", "reduce", "optimizer", "device")


class PhaseTimer:
    """Seconds per named phase since the last ``reset``. A phase observer: a phase lasts until the next one begins."""

    def __init__(self, first: str = "between", clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._phase, self._since = first, clock()

    def __call__(self, phase: str) -> None:
        """End the current phase and begin another."""
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    @property
    def training_seconds(self) -> float:
        """Seconds spent in training steps, without evaluation and checkpoints, up to the last change of phase."""
        return sum(self._seconds.get(name, 0.0) for name in TRAINING_PHASES)

    def reset(self) -> dict[str, float]:
        """Return the seconds per phase, and start again from zero."""
        self(self._phase)
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
