"""Which stream a sample is from, which rank tokenizes it, and which blocks a stream reads.

    global sample g --(g + shift of its round) mod V--> stream s          a round is V samples, one of each stream
    stream s of source k --> part s mod P of its blocks' turns --> block, block, ...

The shift is drawn anew for each round, so that a mixture whose pattern repeats cannot give a stream always the same
source. A data-parallel rank takes the streams that are its number modulo the number of ranks, hence of each batch the
samples of these streams: as many as every other rank where V, ranks and batch divide one another.

A source with fewer blocks than streams has only P parts, P a divisor of V: the V / P streams of a part read the same
documents, and each keeps every (V / P)-th row.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from hlat.runtime.randomness import stream_key

Int64s = npt.NDArray[np.int64]


def assign_streams(seed: int, streams: int, samples: npt.ArrayLike) -> Int64s:
    """The stream of each global sample: int64, the shape of ``samples``."""
    asked = np.asarray(samples, dtype=np.int64)
    rounds, places = np.divmod(asked, streams)
    distinct, inverse = np.unique(rounds, return_inverse=True)
    shifts = np.array([stream_key(seed, "round", int(number)) % streams for number in distinct], dtype=np.int64)
    found: Int64s = (places + shifts[inverse].reshape(asked.shape)) % streams
    return found


def partition_count(streams: int, blocks: int) -> int:
    """Into how many parts the blocks of a source are dealt: the most that divide the streams, none of them empty."""
    return max(part for part in range(1, streams + 1) if streams % part == 0 and part <= max(blocks, 1))


@dataclass(frozen=True)
class StreamAssignment:
    """What of the samples one of several data-parallel ranks takes.

    Attributes:
        index, ranks: which rank of how many.
        batch: samples of a step, over all ranks.
        streams: how many there are.
        seed: of the order.
    """

    index: int
    ranks: int
    batch: int
    streams: int
    seed: int

    @property
    def is_even(self) -> bool:
        """Whether the streams can be shared out, so that each is tokenized by one rank."""
        whole_rounds = self.batch % self.streams == 0 or self.streams % self.batch == 0
        return self.streams % self.ranks == 0 and whole_rounds

    @property
    def owned(self) -> Int64s:
        """The streams that this rank tokenizes: all where they cannot be shared out."""
        return np.arange(self.index, self.streams, self.ranks) if self.is_even else np.arange(self.streams)

    def samples(self, first: int) -> Int64s:
        """The samples of the step that begins with sample ``first`` that this rank takes, ascending."""
        step = np.arange(first, first + self.batch, dtype=np.int64)
        each = self.batch // self.ranks
        if not self.is_even:
            return step[self.index * each : (self.index + 1) * each]
        taken: Int64s = step[assign_streams(self.seed, self.streams, step) % self.ranks == self.index]
        return taken

    def better(self) -> int:
        """A number of streams near this one that could be shared out."""
        return next(
            count
            for distance in range(self.streams * self.batch + self.ranks)
            for count in (self.streams - distance, self.streams + distance)
            if count > 0 and StreamAssignment(self.index, self.ranks, self.batch, count, self.seed).is_even
        )


def row_stride(streams: int, parts: int) -> int:
    """Of how many rows of a part one of its streams keeps one."""
    assert gcd(streams, parts) == parts, "the parts divide the streams"
    return streams // parts
