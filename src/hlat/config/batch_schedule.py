"""Batch schedule: where every global batch of a run begins in the sequence of samples.

    batch.ramp (stages), batch.global_batch
        samples  0 ......... 8 ......... 16 ................ 32 ................ 48 ...
        batches  |     0     |     1     |         2         |         3         |   4 ...
                 | stage of size 8       | batch.global_batch = 16 ...

Boundaries are in the space of samples: a batch that a run skips still takes its place. So the size of a step's batch
is a function of the position in the data, which is one integer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hlat.config.sections.training import RampStage


@dataclass(frozen=True)
class BatchSchedule:
    """Sizes of a run's global batches, in order.

    Attributes:
        size: sequences of each batch after the ramp.
        ramp: number of batches and sequences of each, by stage of the ramp; empty if all batches have one size.
    """

    size: int
    ramp: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, global_batch: int, ramp: Sequence[RampStage], sequence_length: int) -> "BatchSchedule":
        """Take the schedule from the fields of a recipe; the tokens of a stage are rounded up to whole batches."""
        stages = ((-(-stage.tokens // (stage.global_batch * sequence_length)), stage.global_batch) for stage in ramp)
        return cls(global_batch, tuple(stages))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of a batch in each stage, the last one included."""
        return (*(size for _, size in self.ramp), self.size)

    def _stages(self) -> Iterator[tuple[int, int, int]]:
        """Iterate over number and first sample of each stage's first batch, and its size, from the last stage back."""
        starts, number, sample = [], 0, 0
        for count, size in self.ramp:
            starts.append((number, sample, size))
            number, sample = number + count, sample + count * size
        return reversed([*starts, (number, sample, self.size)])

    def first_of(self, number: int) -> int:
        """Return the first sample of batch ``number``, counted from 0: the samples of all batches before it."""
        return next(sample + (number - start) * size for start, sample, size in self._stages() if number >= start)

    def containing(self, sample: int) -> int:
        """Return the number of the batch that a sample belongs to."""
        return next(start + (sample - first) // size for start, first, size in self._stages() if sample >= first)

    def number_of(self, first: int) -> int:
        """Return the number of the batch that begins with sample ``first``.

        Raises:
            ValueError: no batch begins there.
        """
        number = self.containing(first) if first >= 0 else 0
        if self.first_of(number) != first:
            raise ValueError(f"no global batch begins with sample {first}")
        return number

    def batch(self, number: int) -> range:
        """Return the samples of batch ``number``."""
        return range(self.first_of(number), self.first_of(number + 1))

    def batch_at(self, first: int) -> range:
        """Return the samples of the batch that begins with sample ``first``.

        Raises:
            ValueError: no batch begins there.
        """
        return self.batch(self.number_of(first))

    def count(self, samples: int) -> int:
        """Return the number of batches that ``samples`` samples fill, the last one perhaps not completely."""
        return self.containing(samples - 1) + 1 if samples > 0 else 0

    def in_steps(self, steps: int) -> list[tuple[int, int]]:
        """Return number and size of the first ``steps`` batches, by stage; stages that are not reached are left out."""
        found = []
        for count, size in self.ramp:
            found.append((min(count, steps), size))
            steps -= found[-1][0]
        return [(count, size) for count, size in (*found, (steps, self.size)) if count]
