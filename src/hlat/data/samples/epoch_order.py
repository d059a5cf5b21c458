"""The n-th turn -> which item: several lists of items, each counted so many times an epoch, in a new order each epoch.

    turn t --> epoch t // N, place t % N --permute--> p in [0, N) --> list, copy, item

N is the sum of what the lists count. Items are rows of tokens of prepared data, or blocks of files where text is
tokenized while training. A list that counts 2.5 times is there twice, and another half of it each epoch.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hlat.data.samples.permutation import permute
from hlat.runtime.randomness import stream_key

Int64s = npt.NDArray[np.int64]

_CHUNK, _KEPT = 1 << 12, 16


class EpochOrder:
    """Every item as often as its list counts.

    Args:
        items: how many each list has.
        counted: how often each list counts in an epoch; whole numbers repeat it, what is left takes a part of it.
        seed: of the order.
        shuffle: in a permutation, another one each epoch; else one list after the other.

    Attributes:
        epoch: turns of an epoch.
    """

    def __init__(self, items: Sequence[int], counted: Sequence[float], seed: int, shuffle: bool) -> None:
        self._items = np.array(items, dtype=np.int64)
        self._ends = np.cumsum([int(n * times) for n, times in zip(items, counted, strict=True)], dtype=np.int64)
        self._offsets = np.cumsum([0, *items], dtype=np.int64)[:-1]
        self._seed, self._shuffle = seed, shuffle
        self.epoch_length = int(self._ends[-1])
        self._known: dict[tuple[int, int], Int64s] = {}

    def items(self, turns: npt.ArrayLike) -> Int64s:
        """The item of each turn, counted over all lists: int64, the shape of ``turns``."""
        asked = np.asarray(turns, dtype=np.int64)
        epochs, places = np.divmod(asked, self.epoch_length)
        found = np.empty_like(asked)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order = self._order(int(epoch), places[here]) if self._shuffle else places[here]
            found[here] = self._of_epoch(int(epoch), order)
        return found

    def _order(self, epoch: int, places: Int64s) -> Int64s:
        """``permute``, many at a time and remembered: of few numbers it takes as long as of many."""
        out = np.empty_like(places)
        for chunk in np.unique(places // _CHUNK).tolist():
            if (epoch, chunk) not in self._known:
                if len(self._known) >= _KEPT:
                    self._known.clear()
                whole = np.arange(chunk * _CHUNK, min((chunk + 1) * _CHUNK, self.epoch_length))
                self._known[epoch, chunk] = permute(self._seed, epoch, whole, self.epoch_length)
            here = places // _CHUNK == chunk
            out[here] = self._known[epoch, chunk][places[here] % _CHUNK]
        return out

    def _of_epoch(self, epoch: int, places: Int64s) -> Int64s:
        lists = np.searchsorted(self._ends, places, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        copies, items = np.divmod(places - starts[lists], self._items[lists])
        for number in np.unique(lists):
            partial = (lists == number) & (copies == self._whole(int(number)))
            if partial.any() and self._shuffle:  # another part of the list each epoch
                seed = stream_key(self._seed, "part of a list", int(number))
                items[partial] = permute(seed, epoch, items[partial], int(self._items[number]))
        return self._offsets[lists] + items

    def _whole(self, number: int) -> int:
        """How often a list is there as a whole."""
        start = 0 if number == 0 else int(self._ends[number - 1])
        return (int(self._ends[number]) - start) // int(self._items[number])
