"""Training batches: where they come from, and a thread that reads the next one while the current step computes.

global sample index -> reader of a BatchSource -> this rank's sequences
--BatchPrefetcher, a thread--> page-locked memory if there is an accelerator -> the step

prepared   each rank reads its rows; the position in the data is the global sample index
online     worker processes tokenize during training: one rank of each data-parallel group has its rows tokenized
and broadcasts them to its group; the cursors of the data streams are part of the checkpoint
"""

import math
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
import torch

from hlat.checkpoint import Checkpoint, TensorChunk, replicated_chunks
from hlat.config import BatchSchedule
from hlat.data import Batch, OnlineData, OnlineLoader, StreamProgress, TrainingData
from hlat.parallel import ParallelModel
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import DataError
from hlat.runtime.progress import ProgressRecord, advance
from hlat.runtime.terminal import first_of

_CURSORS = "data.cursors"


@sendable
@dataclass(frozen=True)
class LocalBatch:
    """This rank's sequences of a step, and the stream positions after it (online data only)."""

    batch: Batch
    progress: StreamProgress | None = None


class BatchReader:
    """Reads this rank's sequences of each step. By default there is no helper process, and nothing to say or close."""

    def __call__(self, samples: int) -> LocalBatch:
        """Read the batch of the step that begins at global sample ``samples``."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Return and clear the messages for the user; callable from any thread, also during a read."""
        return []

    def silence(self) -> float:
        """Return the seconds since the last sign of life of a helper process that a read waits for; from any thread."""
        return math.inf

    def close(self) -> None:
        """Stop reading ahead; callable from any thread. A read that is waiting ends with an error."""


class BatchSource:
    """Training data of a run. By default the global sample index is the whole position."""

    notes: list[str]  # lines to log at the start of the run

    def reader(self, model: ParallelModel, samples: int) -> BatchReader:
        """Return a reader of this rank's sequences from global sample ``samples`` on. Collective."""
        raise NotImplementedError

    def advance(self, progress: StreamProgress | None) -> None:
        """Move the position past a step that is done; ``progress`` is that of its ``LocalBatch``."""

    def state(self) -> list[TensorChunk]:
        """Return the tensors to checkpoint in addition to the global sample index. Collective."""
        return []

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Set the position to that of a checkpoint, or to the beginning; call it before ``reader``."""

    def epochs(self, samples: int) -> dict[str, float]:
        """Return the passes over each source (key "" for the whole corpus) in so many samples, as far as known."""
        del samples  # text that is tokenized while it is read has no known length
        return {}


class PreparedBatchSource(BatchSource):
    """Batches of prepared data; ``total`` is the number of samples that are read of it, in a run or in a stage."""

    def __init__(self, data: TrainingData, batches: BatchSchedule, total: int, of: str = "run") -> None:
        self._data, self._batches = data, batches
        part = f"{of}, of what other stages leave it" if data.is_part else of
        self.notes = [f"data: {_epochs(data.epochs(total))} in this {part}"]
        if (waste := data.waste) is not None:
            self.notes.append(f"packing: {waste}")

    def reader(self, model: ParallelModel, samples: int) -> BatchReader:
        del samples
        return _PreparedReader(self._data, self._batches, model.rows)

    def epochs(self, samples: int) -> dict[str, float]:
        return self._data.epochs(samples)


def _epochs(counts: Mapping[str, float]) -> str:
    """Describe the passes over each source, or over the corpus (key ""), the most first."""
    ordered = sorted(counts.items(), key=lambda pair: -pair[1])
    texts = [f"{count:.2f} epochs" for _, count in ordered]
    if len(set(texts)) == 1:
        return texts[0] + (f" of each of {len(texts):,} sources" if len(texts) > 1 else "")
    every = [f"{text} of {name}" for text, (name, _) in zip(texts, ordered, strict=True)]
    shown, more = first_of(every)
    return f"{', '.join(shown)}{f' {more}, the fewest {texts[-1]}' if more else ''}"


class _PreparedReader(BatchReader):
    def __init__(self, data: TrainingData, batches: BatchSchedule, rows_of: Callable[[int], range]) -> None:
        self._data, self._batches, self._rows_of = data, batches, rows_of

    def __call__(self, samples: int) -> LocalBatch:
        rows = self._rows_of(len(self._batches.batch_at(samples)))
        return LocalBatch(self._data.batch(samples + rows.start, len(rows)))


class OnlineBatchSource(BatchSource):
    """Batches that are tokenized during training."""

    def __init__(self, data: OnlineData, ranks: HostGroup) -> None:
        self._data, self._ranks = data, ranks
        self._cursors = data.cursors()
        self._owned = data.owned(0)
        self._reports_cursors = True
        self._sample_group: HostGroup | None = None  # the ranks that work on the same samples
        self.notes = [f"data: {note}" for note in data.notes]

    def reader(self, model: ParallelModel, samples: int) -> BatchReader:
        """Return a reader for the ranks that work on the same samples; the first of them starts the tokenizers."""
        index = model.data_index
        if self._sample_group is None:
            self._sample_group = self._ranks.subgroup(model.layout.group(self._ranks.rank, "pp", "cp", "tp"))
        group = self._sample_group
        # Where streams are not shared out, every data-parallel rank has all cursors, and the first one reports them.
        self._reports_cursors = group.is_first and (self._data.is_evenly_assigned or index == 0)
        self._owned = self._data.owned(index)
        return _OnlineReader(lambda say: self._data.loader(index, self._cursors, samples, say), group)

    def advance(self, progress: StreamProgress | None) -> None:
        assert progress is not None, "a batch of online data has its stream positions"
        self._cursors.advance(progress)

    def state(self) -> list[TensorChunk]:
        """Return the cursors of all streams, gathered from the ranks that tokenize them. Collective."""
        # Each cursor is nonzero on one rank only, so the sum over ranks is that rank's value.
        known = np.zeros_like(self._cursors.values)
        if self._reports_cursors:
            known[self._owned] = self._cursors.values[self._owned]
        return replicated_chunks({_CURSORS: self._ranks.all_reduce_sum(torch.from_numpy(known))})

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Load a checkpoint's cursors; raises CheckpointError for another number of streams or sources."""
        if checkpoint is None:
            self._cursors.values[:] = self._data.cursors().values
            return
        checkpoint.check({_CURSORS: torch.from_numpy(self._cursors.values)})
        self._cursors.values[:] = checkpoint.read([_CURSORS])[_CURSORS].numpy()


class _OnlineReader(BatchReader):
    def __init__(self, start: Callable[[Callable[[str], None]], OnlineLoader], group: HostGroup) -> None:
        self._start, self._group = start, group
        self._feed: OnlineLoader | None = None
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        # The thread starts the feed while another thread may close the reader.
        self._start_lock, self._closed = threading.Lock(), False

    def __call__(self, samples: int) -> LocalBatch:
        # The ranks of the group work on the same samples: one tokenizes, the others receive.
        return self._group.run_on_rank0(lambda: self._read(samples))

    def _read(self, samples: int) -> LocalBatch:
        with self._start_lock:
            if self._closed:
                raise DataError("the run ends")  # for the ranks that wait for these samples; never shown to the user
            if self._feed is None:
                self._feed = self._start(self._notes.put)
        return LocalBatch(*self._feed.read(samples))

    def notes(self) -> list[str]:
        return [self._notes.get() for _ in range(self._notes.qsize())]

    def silence(self) -> float:
        return math.inf if self._feed is None else self._feed.silence()

    def close(self) -> None:
        with self._start_lock:
            self._closed = True
            if self._feed is not None:
                self._feed.close()


_REPORT_EVERY = (
    0.5  # seconds: while a batch is late, the reader's messages are shown and its progress is seen this often
)


class BatchPrefetcher:
    """Reads one batch ahead, into page-locked memory if ``pinned``. A context manager; leaving it ends the thread."""

    def __init__(self, reader: BatchReader, batches: BatchSchedule, pinned: bool, say: Callable[[str], None]) -> None:
        self._reader, self._batches, self._pinned, self._say = reader, batches, pinned, say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._prefetched: tuple[int, Future[LocalBatch]] | None = None
        self._thread_id = 0

    def __enter__(self) -> "BatchPrefetcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A read in progress is not cancelled: other ranks may be waiting for this rank's answer, even if an error.
        self._reader.close()  # first: the thread may be waiting for a store that does not answer
        self._thread.shutdown(wait=True)

    def discard(self) -> None:
        """Close the reader and drop the prefetched batch; ``restart`` has to follow."""
        # Not cancelled, for the same reason as in __exit__.
        self._reader.close()
        if self._prefetched is not None:
            wait([self._prefetched[1]])
            self._prefetched = None

    def restart(self, reader: BatchReader) -> None:
        self._reader = reader

    def next_batch(self, samples: int) -> LocalBatch:
        """Return this rank's sequences of the step that begins at global sample ``samples``; prefetch the next step's.

        Raises:
            DataError: a shard is damaged, or text cannot be read.
            StorageError: the disk of the cache reported an error.
        """
        if self._prefetched is None or self._prefetched[0] != samples:
            self._prefetched = (samples, self._thread.submit(self._read, samples))
        local_batch = self._wait_for(self._prefetched[1])
        following = self._batches.batch_at(samples).stop
        self._prefetched = (following, self._thread.submit(self._read, following))
        return local_batch

    def _wait_for(self, future: Future[LocalBatch]) -> LocalBatch:
        while not wait([future], _REPORT_EVERY).done:
            self._show_notes()
            if self._is_alive():
                advance()
        self._show_notes()
        return future.result()

    def _is_alive(self) -> bool:
        # A slow disk or tokenizer is no hang: the thread waits for the disk, or a helper process gives signs of life.
        return self._reader.silence() < 2 * _REPORT_EVERY or ProgressRecord.waits_for_disk(self._thread_id)

    def _show_notes(self) -> None:
        for note in self._reader.notes():
            self._say(note)

    def _read(self, samples: int) -> LocalBatch:
        self._thread_id = threading.get_native_id()
        local_batch = self._reader(samples)
        if not self._pinned:
            return local_batch
        batch = local_batch.batch
        positions_BS = None if batch.positions_BS is None else batch.positions_BS.pin_memory()
        inputs_BS, labels_BS = batch.inputs_BS.pin_memory(), batch.labels_BS.pin_memory()
        pinned = replace(batch, inputs_BS=inputs_BS, labels_BS=labels_BS, positions_BS=positions_BS)
        return replace(local_batch, batch=pinned)
