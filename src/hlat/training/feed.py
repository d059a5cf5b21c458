"""The batches of a run, each read while the step before it computes.

position -> sequences of this rank, read by a thread, in page-locked memory where there is an accelerator
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType

from hlat.data import Batch, TrainingData


class Feed:
    """Reads one batch ahead; a context manager that leaves no thread behind.

    Args:
        data: the samples.
        rows: which sequences of a global batch this rank takes.
        global_batch: sequences of a step.
        pinned: whether batches are put where an accelerator can fetch them while it computes.
    """

    def __init__(self, data: TrainingData, rows: range, global_batch: int, pinned: bool) -> None:
        self._data, self._rows, self._size, self._pinned = data, rows, global_batch, pinned
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def __enter__(self) -> "Feed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def take(self, samples: int) -> Batch:
        """This rank's sequences of the step that begins at global sample ``samples``.

        Raises:
            DataError: a shard is damaged.
        """
        if self._ahead is not None and self._ahead[0] == samples:
            batch = self._ahead[1].result()
        else:
            batch = self._read(samples)
        following = samples + self._size
        self._ahead = (following, self._thread.submit(self._read, following))
        return batch

    def _read(self, samples: int) -> Batch:
        batch = self._data.batch(samples + self._rows.start, len(self._rows))
        if not self._pinned:
            return batch
        return replace(batch, inputs_BS=batch.inputs_BS.pin_memory(), labels_BS=batch.labels_BS.pin_memory())
