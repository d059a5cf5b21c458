"""Saving while training goes on: what a rank does of it, beside the process that does the rest (``saver.py``).

    submit: blocks --copy--> memory shared with the saver, Order -->        training goes on
    notes:  Refusal, ..., SaveResult                                        as the saver tells them
    settle: the ranks tell each other the result, and whose saver has gone --> the same on every rank

There is one copy, so a save waits until the one before it has settled. Where a saver has gone, what was copied is still
there, and the ranks can save it themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from hlat.checkpoint.background.saver_process import (
    BufferMessage,
    SaveRequest,
    SaverFailed,
    SaverJoined,
    SaverSettings,
    UploadsDone,
)
from hlat.checkpoint.background.staging_buffer import StagingBuffer, buffer_bytes
from hlat.checkpoint.format import TensorChunk
from hlat.checkpoint.protocol import CheckpointContent, CheckpointStore, FailedAttempt, SaveResult
from hlat.checkpoint.tiers import SnapshotResult, TierEvent, TierSettings
from hlat.runtime.distributed import HelperProcess, Runtime

_LOOK = 0.05  # seconds in which a rank looks at its own saver only

SaverReport = FailedAttempt | SaveResult | SnapshotResult | TierEvent
"""What a saver tells of its work."""


@dataclass(frozen=True)
class SaveOutcome:
    """What the ranks agree on.

    Attributes:
        result: of what was submitted last; None if there was none.
        lost: rank -> why its saver cannot go on. All savers are given up then.
        pending: what this rank submitted, where no rank knows what became of it.
    """

    result: SaveResult | SnapshotResult | None
    lost: dict[int, str]
    pending: CheckpointContent | None


class AsyncSaver:
    """The saver of this rank.

    Args:
        process: does ``run_saver``.
        runtime: this rank.
        store: where checkpoints go. The saver holds the run's folder too, with the lock on rank 0, while it may write.
        retries: how many more tries a save has that failed.
        tiers: where else the state is kept; None for nowhere.
    """

    def __init__(
        self,
        process: HelperProcess,
        runtime: Runtime,
        store: CheckpointStore,
        retries: int,
        tiers: TierSettings | None = None,
    ) -> None:
        self._process, self._runtime = process, runtime
        self._copy: StagingBuffer | None = None
        self._pending: CheckpointContent | None = None  # submitted and not settled; its blocks lie in the copy
        self._result: SaveResult | SnapshotResult | None = None  # of it
        self._copies = tiers is not None and tiers.config.remote is not None
        self._copying = False  # whether the saver is at work on the copies of what it has committed
        self._joined = False  # whether the saver has found the others
        self._met = False  # whether that has been waited for
        self._gone = ""  # why this rank's saver cannot go on
        settings = SaverSettings(runtime.rendezvous, store.root, store.keep_last, store.keep_every_steps, retries, tiers)
        folder = store.folder
        if folder is not None:
            settings = replace(settings, run_dir=folder.path, number=folder.run_id)
        self._send(settings, [] if folder is None else [folder.descriptor])

    def prepare(self, chunks: Sequence[TensorChunk]) -> None:
        """Have memory fetched for copies of such blocks, while training goes on."""
        size = buffer_bytes(self._own(chunks))
        try:
            self._copy = StagingBuffer(size, self._runtime.device)
        except OSError as error:
            self._lose(_no_memory(size, error))
        else:
            self._send(BufferMessage(), [self._copy.descriptor])

    def submit(self, content: CheckpointContent, snapshot: bool = False) -> None:
        """Copy a state and have it written. Returns when it has been copied. Collective, after ``settle``.

        Args:
            content: the state.
            snapshot: whether as a snapshot, and not as a checkpoint.
        """
        assert self._pending is None and self._copy is not None, "the memory is there, and free"
        slots = self._copy.fill(self._own(content.chunks))
        self._pending = replace(content, chunks=self._copy.chunks(slots))
        self._send(SaveRequest(content.step, slots, content.meta, content.files, snapshot))

    def reports(self, wait: bool) -> Iterator[SaverReport]:
        """What the saver has told since it was asked last.

        Args:
            wait: whether to wait for the result of the save submitted last.
        """
        return self._heard(lambda: None if wait and self._pending is not None and self._result is None else 0.0)

    def finish_uploads(self) -> Iterator[SaverReport]:
        """Wait until the saver has brought the object store up to date; what it tells meanwhile."""
        return self._heard(lambda: None if self._copying else 0.0)

    def _meet(self) -> None:
        """Wait until the savers have found each other, or one of them cannot: the others may look for it for long."""
        while not self._met:
            early = list(self._heard(lambda: 0.0 if self._joined else _LOOK))
            assert not early, "nothing has been ordered yet"
            told = self._runtime.ranks.all_gather((self._gone, self._joined))
            self._met = all(joined for _, joined in told) or any(gone for gone, _ in told)

    def _heard(self, seconds: Callable[[], float | None]) -> Iterator[SaverReport]:
        """What the saver tells, for so long as it is silent for less than so many seconds; None is for ever."""
        while not self._gone:
            try:
                received = self._process.channel.receive(seconds())
            except EOFError:
                self._lose(f"ended with exit code {self._process.wait()}")
                return
            if received is None:
                return
            note: SaverReport | SaverFailed | SaverJoined | UploadsDone = received[0]
            if isinstance(note, SaverFailed):
                self._lose(note.message)
                return
            if isinstance(note, SaverJoined):
                self._joined = True
                continue
            if isinstance(note, UploadsDone):
                self._copying = False
                continue
            if isinstance(note, SaveResult | SnapshotResult):
                self._result = note
                self._copying = self._copies and isinstance(note, SaveResult) and note.path is not None
            yield note

    def agree_on_outcome(self) -> SaveOutcome:
        """Agree with the other ranks on what has been heard, once all ``notes`` have. Collective.

        What is submitted after this is written even if this process ends at once.
        """
        if not self._met:
            self._meet()
        if self._copy is not None:
            try:
                self._copy.wait()
            except OSError as error:
                self._lose(_no_memory(self._copy.size, error))
        told = self._runtime.ranks.all_gather((self._gone, self._result))
        result = next((result for _, result in told if result is not None), None)
        lost = {rank: gone for rank, (gone, _) in enumerate(told) if gone}
        pending = self._pending if result is None else None
        self._pending = self._result = None
        return SaveOutcome(result, lost, pending)

    def kill(self) -> None:
        """End the saver, whatever it does. Nothing is written by it once this returns."""
        self._process.kill()

    def _own(self, chunks: Sequence[TensorChunk]) -> list[TensorChunk]:
        """Those that this rank's saver is to write."""
        return [chunk for chunk in chunks if self._runtime.ranks.is_first or not chunk.replicated]

    def _send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        with suppress(EOFError):  # what it said before it went is heard with the notes
            self._process.channel.send(message, descriptors)

    def _lose(self, reason: str) -> None:
        self._gone = self._gone or reason
        self._process.kill()


def _no_memory(size: int, error: OSError) -> str:
    return f"there is no memory for a copy of the state, {size} bytes ({error.strerror})"
