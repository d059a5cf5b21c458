"""Where the batches of a run come from: prepared shards, or processes that tokenize while it trains.

prepared   each rank reads its rows; the position is the number of the sample
online     one rank of each data-parallel group has its rows tokenized, the others get them from it; how far the
           streams have come is part of the checkpoint
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hlat.checkpoint.format import TensorChunk, replicated_chunks
from hlat.checkpoint.protocol import Checkpoint
from hlat.data.online import OnlineData, OnlineLoader, StreamProgress
from hlat.data.samples import Batch, TrainingData
from hlat.parallel import ParallelModel
from hlat.runtime import DataError
from hlat.runtime.distributed import HostGroup, sendable

_CURSORS = "data.cursors"


@sendable
@dataclass(frozen=True)
class Reading:
    """A rank's part of a step, and where the data goes on after it."""

    batch: Batch
    progress: StreamProgress | None = None


class Reader(Protocol):
    """Reads this rank's part of each step."""

    def __call__(self, samples: int) -> Reading:
        """That of the step which begins at global sample ``samples``."""

    def notes(self) -> list[str]:
        """What the user should know since this was last asked; from any thread, also during a call."""

    def close(self) -> None:
        """End what reads ahead; from any thread. A call that waits for it ends with an error."""


class Samples(Protocol):
    """The training samples of a run."""

    notes: list[str]

    def reader(self, model: ParallelModel, samples: int) -> Reader:
        """What reads this rank's part, from a sample on. Collective."""

    def advance(self, progress: StreamProgress | None) -> None:
        """Take note of a step that is done."""

    def state(self) -> list[TensorChunk]:
        """What a checkpoint has to hold besides the number of the sample. Collective."""

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Go on where a checkpoint left off, or from the beginning; a reader that is to do so is made after this."""


class PreparedSamples:
    """Samples of prepared data.

    Args:
        data: the samples.
        total: samples of the run.
    """

    def __init__(self, data: TrainingData, total: int) -> None:
        self._data = data
        epochs = (f"{count:.2f} epochs{f' of {name}' if name else ''}" for name, count in data.epochs(total).items())
        self.notes = [f"data: {', '.join(epochs)} in this run", *(f"packing: {waste}" for waste in data.waste)]

    def reader(self, model: ParallelModel, samples: int) -> Reader:
        """Reads rows as they are asked for."""
        del samples
        return _PreparedReader(self._data, model.rows)

    def advance(self, progress: StreamProgress | None) -> None:
        """Nothing to note: the number of the sample says everything."""

    def state(self) -> list[TensorChunk]:
        """Nothing."""
        return []

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Nothing to restore."""


class _PreparedReader:
    def __init__(self, data: TrainingData, rows: range) -> None:
        self._data, self._rows = data, rows

    def __call__(self, samples: int) -> Reading:
        return Reading(self._data.batch(samples + self._rows.start, len(self._rows)))

    def notes(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class OnlineSamples:
    """Samples that are tokenized while the model trains.

    Args:
        data: the samples.
        ranks: the processes of the run.
    """

    def __init__(self, data: OnlineData, ranks: HostGroup) -> None:
        self._data, self._ranks = data, ranks
        self._cursors = data.cursors()
        self._owned = data.owned(0)
        self._speaks = True
        self._together: HostGroup | None = None  # those who work on the same samples
        self.notes = [f"data: {note}" for note in data.notes]

    def reader(self, model: ParallelModel, samples: int) -> Reader:
        """Makes a group for those who work on the same samples, and has the first of them start what tokenizes."""
        index = model.data_index
        if self._together is None:
            self._together = self._ranks.subgroup(model.layout.group(self._ranks.rank, "pp", "cp", "tp"))
        together = self._together
        # Where streams cannot be shared out every data-parallel rank knows them all, and the first one speaks.
        self._speaks = together.is_first and (self._data.is_evenly_assigned or index == 0)
        self._owned = self._data.owned(index)
        return _OnlineReader(lambda say: self._data.loader(index, self._cursors, samples, say), together)

    def advance(self, progress: StreamProgress | None) -> None:
        """Move the cursors of the streams that a step consumed."""
        assert progress is not None, "online, every batch says how far it went"
        self._cursors.advance(progress)

    def state(self) -> list[TensorChunk]:
        """The cursors of all streams, of which each rank knows those that it tokenizes."""
        known = np.zeros_like(self._cursors.values)
        if self._speaks:
            known[self._owned] = self._cursors.values[self._owned]
        return replicated_chunks({_CURSORS: self._ranks.all_reduce_sum(torch.from_numpy(known))})

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Take the cursors over; without a checkpoint, begin.

        Raises:
            CheckpointError: it has none, or of another number of streams or sources.
        """
        if checkpoint is None:
            self._cursors.values[:] = self._data.cursors().values
            return
        checkpoint.check({_CURSORS: torch.from_numpy(self._cursors.values)})
        self._cursors.values[:] = checkpoint.read([_CURSORS])[_CURSORS].numpy()


class _OnlineReader:
    def __init__(self, start: Callable[[Callable[[str], None]], OnlineLoader], together: HostGroup) -> None:
        self._start, self._together = start, together
        self._feed: OnlineLoader | None = None
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._starting, self._closed = threading.Lock(), False

    def __call__(self, samples: int) -> Reading:
        return self._together.run_on_rank0(lambda: self._read(samples))

    def _read(self, samples: int) -> Reading:
        with self._starting:
            if self._closed:
                raise DataError("the run ends")  # to whoever waits for these samples; nobody prints it
            if self._feed is None:
                self._feed = self._start(self._notes.put)
        return Reading(*self._feed.read(samples))

    def notes(self) -> list[str]:
        return [self._notes.get() for _ in range(self._notes.qsize())]

    def close(self) -> None:
        with self._starting:
            self._closed = True
            if self._feed is not None:
                self._feed.close()
