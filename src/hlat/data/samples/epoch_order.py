"""The order of items over the epochs: several lists of items, each repeated as configured, in a new order each epoch.

    position t --> epoch t // N, offset t % N --permute--> p in [0, N) --> list, repetition, item

N is the sum of the lists' repeated lengths. Items are rows of prepared data, or blocks of files where text is tokenized
during training. A list with repeats 2.5 occurs twice in full in each epoch, and a different half of it once more.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hlat.data.samples.permutation import permute
from hlat.runtime.randomness.rng_keys import stream_key

Int64s = npt.NDArray[np.int64]

_CHUNK, _CACHED_CHUNKS = 1 << 12, 16


class EpochOrder:
    """An endless sequence of epochs in which every item occurs as often as its list is repeated.

    Args:
        items: number of items of each list.
        repeats: occurrences of each list in an epoch; the fractional part selects that fraction of its items.
        seed: seed of the order.
        shuffle: True for a new permutation each epoch; False for one list after the other.

    Attributes:
        epoch_length: positions per epoch, N.
    """

    def __init__(self, items: Sequence[int], repeats: Sequence[float], seed: int, shuffle: bool) -> None:
        self._items = np.array(items, dtype=np.int64)
        self._ends = np.cumsum([int(n * times) for n, times in zip(items, repeats, strict=True)], dtype=np.int64)
        self._offsets = np.cumsum([0, *items], dtype=np.int64)[:-1]
        self._seed, self._shuffle = seed, shuffle
        self.epoch_length = int(self._ends[-1])
        self._cached: dict[tuple[int, int], Int64s] = {}

    def items(self, positions: npt.ArrayLike) -> Int64s:
        """Return the item at each position, numbered over all lists: int64, the shape of ``positions``."""
        indexes = np.asarray(positions, dtype=np.int64)
        epochs, offsets = np.divmod(indexes, self.epoch_length)
        out = np.empty_like(indexes)
        for epoch in np.unique(epochs):
            selected = epochs == epoch
            order = self._order(int(epoch), offsets[selected]) if self._shuffle else offsets[selected]
            out[selected] = self._items_of_epoch(int(epoch), order)
        return out

    def _order(self, epoch: int, offsets: Int64s) -> Int64s:
        """Apply ``permute`` in cached chunks: permuting a few numbers takes as long as permuting many."""
        out = np.empty_like(offsets)
        for chunk in np.unique(offsets // _CHUNK).tolist():
            if (epoch, chunk) not in self._cached:
                if len(self._cached) >= _CACHED_CHUNKS:
                    self._cached.clear()
                chunk_offsets = np.arange(chunk * _CHUNK, min((chunk + 1) * _CHUNK, self.epoch_length))
                self._cached[epoch, chunk] = permute(self._seed, epoch, chunk_offsets, self.epoch_length)
            selected = offsets // _CHUNK == chunk
            out[selected] = self._cached[epoch, chunk][offsets[selected] % _CHUNK]
        return out

    def _items_of_epoch(self, epoch: int, offsets: Int64s) -> Int64s:
        """Map permuted offsets of one epoch to items."""
        lists = np.searchsorted(self._ends, offsets, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        copies, items = np.divmod(offsets - starts[lists], self._items[lists])
        for number in np.unique(lists):
            partial = (lists == number) & (copies == self._full_repeats(int(number)))
            if partial.any() and self._shuffle:  # select a different fraction of the list each epoch
                seed = stream_key(self._seed, "part of a list", int(number))
                items[partial] = permute(seed, epoch, items[partial], int(self._items[number]))
        return self._offsets[lists] + items

    def _full_repeats(self, number: int) -> int:
        """Return how many times a list occurs in full in an epoch."""
        start = 0 if number == 0 else int(self._ends[number - 1])
        return (int(self._ends[number]) - start) // int(self._items[number])
