"""Assignment of samples to streams, of streams to ranks, and of blocks to streams.

    global sample g --(g + shift of its round) mod V--> stream s          a round is V samples, one of each stream
    stream s of source k --> partition s mod P of its blocks --> block, block, ...

The shift is drawn anew for each round, so that a mixture with a periodic pattern cannot give a stream always the same
source. A data-parallel rank tokenizes the streams congruent to its index modulo the number of ranks, hence takes the
samples of these streams from each batch: as many as every other rank if V, ranks and batch divide one another.

A source with fewer blocks than streams has only P partitions of its blocks, P a divisor of V: the V / P streams of a
partition read the same documents, and each keeps every (V / P)-th row.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from hlat.config import BatchSchedule
from hlat.runtime.randomness.rng_keys import stream_key

Int64s = npt.NDArray[np.int64]


def assign_streams(seed: int, streams: int, samples: npt.ArrayLike) -> Int64s:
    """Return the stream of each global sample: int64, the shape of ``samples``.

    Args:
        seed: seed of the order.
        streams: number of streams, V.
        samples: global sample indexes, any shape.
    """
    indexes = np.asarray(samples, dtype=np.int64)
    rounds, offsets = np.divmod(indexes, streams)
    distinct, inverse = np.unique(rounds, return_inverse=True)
    shifts = np.array([stream_key(seed, "round", int(number)) % streams for number in distinct], dtype=np.int64)
    assigned: Int64s = (offsets + shifts[inverse].reshape(indexes.shape)) % streams
    return assigned


def partition_count(streams: int, blocks: int) -> int:
    """Return the number of partitions of a source's blocks: the largest divisor of ``streams`` up to ``blocks``."""
    return max(count for count in range(1, streams + 1) if streams % count == 0 and count <= max(blocks, 1))


@dataclass(frozen=True)
class StreamAssignment:
    """The samples and streams of one data-parallel rank.

    Attributes:
        index: this data-parallel rank.
        ranks: number of data-parallel ranks.
        batches: boundaries of the global batches.
        streams: number of streams.
        seed: seed of the order.
    """

    index: int
    ranks: int
    batches: BatchSchedule
    streams: int
    seed: int

    @property
    def is_even(self) -> bool:
        """True if the streams can be divided among the ranks, so that each is tokenized by one rank.

        Batches of a ramp need no check of their own. If V and the sizes of all batches are multiples of the number of
        ranks, so are the parts into which the ends of rounds cut a batch; and of so many consecutive samples of a round
        each rank has the same number.
        """
        size = self.batches.size
        return self.streams % self.ranks == 0 and (size % self.streams == 0 or self.streams % size == 0)

    @property
    def owned(self) -> Int64s:
        """The streams that this rank tokenizes, int64; all streams if they cannot be divided among the ranks."""
        return np.arange(self.index, self.streams, self.ranks) if self.is_even else np.arange(self.streams)

    def samples(self, first: int) -> Int64s:
        """Return this rank's global samples of the step that begins with sample ``first``, ascending, int64."""
        batch = self.batches.batch_at(first)
        step = np.arange(batch.start, batch.stop, dtype=np.int64)
        rank_batch = len(batch) // self.ranks
        if not self.is_even:
            return step[self.index * rank_batch : (self.index + 1) * rank_batch]
        selected: Int64s = step[assign_streams(self.seed, self.streams, step) % self.ranks == self.index]
        return selected

    def nearest_even_streams(self) -> int:
        """Return the number of streams nearest to this one that can be divided among the ranks."""
        return next(
            count
            for distance in range(self.streams * self.batches.size + self.ranks)
            for count in (self.streams - distance, self.streams + distance)
            if count > 0 and StreamAssignment(self.index, self.ranks, self.batches, count, self.seed).is_even
        )


def row_stride(streams: int, partitions: int) -> int:
    """Return the row stride of a stream: it keeps every (streams // partitions)-th row of its block partition."""
    assert gcd(streams, partitions) == partitions, "the number of partitions divides the number of streams"
    return streams // partitions
