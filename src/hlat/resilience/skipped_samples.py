"""Samples that a run leaves out, and where its steps are in the data because of that.

    ranges left out, batch --starts--> where each step's batch begins, what is read past before it

Order stays a pure function: step k reads the k-th global batch that is not left out. Ranges are added while the run
goes on, always behind what the last step has read, so that no step that is done changes its place.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Range(NamedTuple):
    """Global samples ``first <= g < stop``: one global batch."""

    first: int
    stop: int


class SkippedSamples:
    """Global batches that are left out.

    Args:
        batch: sequences of a global batch.
        ranges: what is left out, in any order.
    """

    def __init__(self, batch: int, ranges: Iterable[Range] = ()) -> None:
        self._batch = batch
        self._firsts: set[int] = set()
        for one in ranges:
            self.add(one)

    def add(self, samples: Range) -> None:
        """Leave a global batch out.

        Raises:
            ValueError: it is no global batch, or is left out already.
        """
        first, stop = samples
        if first < 0 or first % self._batch or stop != first + self._batch or first in self._firsts:
            raise ValueError(f"[{first}, {stop}) is no global batch of {self._batch} samples that is still read")
        self._firsts.add(first)

    def after(self, steps: int) -> int:
        """The sample behind the batch of the last of so many steps: how far the data has been consumed."""
        position = steps * self._batch
        for first in sorted(self._firsts):
            if first >= position:
                break
            position += self._batch
        return position

    def before_step(self, steps: int) -> Iterator[int]:
        """The batches, by their first samples, that are read past once so many steps are done."""
        position = self.after(steps)
        while position in self._firsts:
            yield position
            position += self._batch

    def start(self, steps: int) -> int:
        """The first sample of the step that follows so many."""
        position = self.after(steps)
        while position in self._firsts:
            position += self._batch
        return position
