"""Batch prefetcher: a thread reads the next batch while the current step computes.

global sample index -> a thread reads this rank's sequences -> page-locked memory if there is an accelerator -> the step
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import TracebackType

from hlat.config import BatchSchedule
from hlat.runtime.process.progress import ProgressRecord, advance
from hlat.training.batches.batch_sources import BatchReader, LocalBatch

_EVERY = 0.5  # seconds: while a batch is late, the reader's messages are shown and its progress is seen this often


class BatchPrefetcher:
    """Reads one batch ahead. A context manager; leaving it ends the thread.

    Args:
        reader: reads this rank's sequences of a step.
        batches: boundaries of the global batches.
        pinned: copy batches to page-locked memory, from which an accelerator can fetch them asynchronously.
        say: shows a message of the reader to the user.
    """

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
        """Read with another reader from now on."""
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
        while not wait([future], _EVERY).done:
            self._show_notes()
            if self._is_alive():
                advance()
        self._show_notes()
        return future.result()

    def _is_alive(self) -> bool:
        """Return True if the read goes on: the thread waits for a disk, or a helper process gives signs of life."""
        return self._reader.silence() < 2 * _EVERY or ProgressRecord.waits_for_disk(self._thread_id)

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
