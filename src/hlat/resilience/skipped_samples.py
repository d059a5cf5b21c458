"""Skipped samples of a run, and the resulting positions of its steps in the data.

    skipped ranges, batch size -> first sample of each step's batch, skipped batches before it

The order stays a pure function: step k reads the k-th global batch that is not skipped. Ranges are added during the
run, always after the last sample that was read, so the positions of finished steps never change.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class SampleRange(NamedTuple):
    """Global samples ``first <= g < stop``: one global batch."""

    first: int
    stop: int


class SkippedSamples:
    """Global batches that are skipped.

    Args:
        batch: sequences of a global batch.
        ranges: skipped global batches, in any order.
    """

    def __init__(self, batch: int, ranges: Iterable[SampleRange] = ()) -> None:
        self._batch = batch
        self._firsts: set[int] = set()
        for samples in ranges:
            self.add(samples)

    def add(self, samples: SampleRange) -> None:
        """Skip a global batch.

        Raises:
            ValueError: ``samples`` is no global batch, or is skipped already.
        """
        first, stop = samples
        if first < 0 or first % self._batch or stop != first + self._batch or first in self._firsts:
            raise ValueError(f"[{first}, {stop}) is no global batch of {self._batch} samples, or is skipped already")
        self._firsts.add(first)

    def position_after(self, steps: int) -> int:
        """Return the sample after the last one read by the first ``steps`` steps: the position in the data."""
        position = steps * self._batch
        for first in sorted(self._firsts):
            if first >= position:
                break
            position += self._batch
        return position

    def skipped_after(self, steps: int) -> Iterator[int]:
        """Yield the first samples of the batches that are skipped between step ``steps`` and the next one."""
        position = self.position_after(steps)
        while position in self._firsts:
            yield position
            position += self._batch

    def next_step_start(self, steps: int) -> int:
        """Return the first sample of the step that follows step ``steps``."""
        position = self.position_after(steps)
        while position in self._firsts:
            position += self._batch
        return position
