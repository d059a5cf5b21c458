"""Skipped samples of a run, and the resulting positions of its steps in the data.

    skipped batches, batch schedule -> first sample of each step's batch, skipped batches before it

The order stays a pure function: step k reads the k-th global batch that is not skipped. Ranges are added during the
run, always after the last sample that was read, so the positions of finished steps never change.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hlat.config import BatchSchedule


class SampleRange(NamedTuple):
    """Global samples ``first <= g < stop``: one global batch."""

    first: int
    stop: int


class SkippedSamples:
    """Global batches that are skipped.

    Args:
        batches: boundaries of the global batches.
        ranges: skipped global batches, in any order.
    """

    def __init__(self, batches: BatchSchedule, ranges: Iterable[SampleRange] = ()) -> None:
        self._batches = batches
        self._skipped: set[int] = set()  # numbers of batches
        for samples in ranges:
            self.add(samples)

    def add(self, samples: SampleRange) -> None:
        """Skip a global batch.

        Raises:
            ValueError: ``samples`` is no global batch, or is skipped already.
        """
        number = self._batches.number_of(samples.first)
        if samples.stop != self._batches.first_of(number + 1) or number in self._skipped:
            raise ValueError(f"[{samples.first}, {samples.stop}) is no global batch, or is skipped already")
        self._skipped.add(number)

    def position_after(self, steps: int) -> int:
        """Return the sample after the last one read by the first ``steps`` steps: the position in the data."""
        return self._batches.first_of(self._batches_until(steps))

    def samples_of(self, steps: int) -> int:
        """Return the number of samples of the first ``steps`` steps, without the skipped ones."""
        end = self._batches_until(steps)
        return self._batches.first_of(end) - sum(len(self._batches.batch(n)) for n in self._skipped if n < end)

    def skipped_after(self, steps: int) -> Iterator[int]:
        """Yield the first samples of the batches that are skipped between step ``steps`` and the next one."""
        number = self._batches_until(steps)
        while number in self._skipped:
            yield self._batches.first_of(number)
            number += 1

    def next_step_start(self, steps: int) -> int:
        """Return the first sample of the step that follows step ``steps``."""
        number = self._batches_until(steps)
        while number in self._skipped:
            number += 1
        return self._batches.first_of(number)

    def _batches_until(self, steps: int) -> int:
        """Return the number of batches up to the last one that the first ``steps`` steps read."""
        count = steps
        for number in sorted(self._skipped):
            if number >= count:
                break
            count += 1
        return count
