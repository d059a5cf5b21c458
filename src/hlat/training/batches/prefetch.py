"""The batches of a run, each read while the step before it computes.

position -> sequences of this rank, read by a thread, in page-locked memory where there is an accelerator
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import TracebackType

from hlat.training.batches.batch_sources import Reader, Reading

_LISTEN = 0.5  # seconds: why a batch takes its time is told while it does


class Feed:
    """Reads one batch ahead; a context manager that leaves no thread behind.

    Args:
        reader: reads this rank's part of a step.
        global_batch: sequences of a step.
        pinned: whether batches are put where an accelerator can fetch them while it computes.
        say: takes what the reader has to tell the user.
    """

    def __init__(self, reader: Reader, global_batch: int, pinned: bool, say: Callable[[str], None]) -> None:
        self._reader, self._size, self._pinned, self._say = reader, global_batch, pinned, say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._ahead: tuple[int, Future[Reading]] | None = None

    def __enter__(self) -> "Feed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What is being read ahead is not cancelled: other ranks may wait for this one's answer, if only an error.
        self._reader.close()  # first: what the thread waits for may be a store that is away
        self._thread.shutdown(wait=True)

    def drop(self) -> None:
        """Forget what was read ahead, and close the reader; ``begin`` gives another."""
        # Not cancelled, as at the end: other ranks may wait for this one's answer, if only an error.
        self._reader.close()
        if self._ahead is not None:
            wait([self._ahead[1]])
            self._ahead = None

    def begin(self, reader: Reader) -> None:
        """Read with another reader from now on."""
        self._reader = reader

    def take(self, samples: int) -> Reading:
        """This rank's sequences of the step that begins at global sample ``samples``.

        Raises:
            DataError: a shard is damaged, or text cannot be read.
            StorageError: the disk of the cache refused.
        """
        if self._ahead is None or self._ahead[0] != samples:
            self._ahead = (samples, self._thread.submit(self._read, samples))
        reading = self._waited(self._ahead[1])
        following = samples + self._size
        self._ahead = (following, self._thread.submit(self._read, following))
        return reading

    def _waited(self, future: Future[Reading]) -> Reading:
        while not wait([future], _LISTEN).done:
            self._tell()
        self._tell()
        return future.result()

    def _tell(self) -> None:
        for note in self._reader.notes():
            self._say(note)

    def _read(self, samples: int) -> Reading:
        reading = self._reader(samples)
        if not self._pinned:
            return reading
        batch = reading.batch
        positions_BS = None if batch.positions_BS is None else batch.positions_BS.pin_memory()
        inputs_BS, labels_BS = batch.inputs_BS.pin_memory(), batch.labels_BS.pin_memory()
        pinned = replace(batch, inputs_BS=inputs_BS, labels_BS=labels_BS, positions_BS=positions_BS)
        return replace(reading, batch=pinned)
