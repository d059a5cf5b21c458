"""Asynchronous saving, on the side of a training rank; the saver process is in ``saver_process.py``.

    submit:             chunks --copy--> staging buffer, SaveRequest --> saver      training continues
    reports:            FailedAttempt, ..., SaveResult                              from the saver
                        signs of life of all savers --exchanged while ranks wait--> a saver without any is killed
    agree_on_outcome:   result, lost savers --exchanged by all ranks--> SaveOutcome, the same on every rank

There is one staging buffer, so a save starts only after the previous one has its outcome. If a saver is lost, the copy
is still in the buffer, and the ranks can save it themselves.
"""

import time
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
from hlat.checkpoint.format.tensor_chunks import TensorChunk
from hlat.checkpoint.protocol.commit import CheckpointContent
from hlat.checkpoint.protocol.retry import FailedAttempt, SaveResult
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.checkpoint.tiers.run_tiers import SnapshotResult, TierEvent, TierSettings
from hlat.runtime.distributed.helper_process import HelperProcess
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.process.process_status import is_stopped
from hlat.runtime.process.progress import advance, blocking_call

_TICK = 0.5  # seconds: how long a rank waits for its own saver before it exchanges with the other ranks


@dataclass(frozen=True)
class SlowStorage:
    """Observation that a saver has been waiting for its storage for long; it goes on when that answers."""

    rank: int
    seconds: float


SaverReport = FailedAttempt | SaveResult | SnapshotResult | TierEvent | SlowStorage
"""Message of a saver process about its work, or an observation of it."""


@dataclass(frozen=True)
class SaveOutcome:
    """Outcome of a save; ``result`` and ``lost`` are the same on all ranks.

    Attributes:
        result: result of the last save; None if there was none, or if no rank knows it.
        lost: rank -> why its saver cannot continue. If any is lost, the caller kills all savers.
        pending: content that this rank submitted, if no rank knows the result of the save; its chunks are views of the
            staging buffer.
    """

    result: SaveResult | SnapshotResult | None
    lost: dict[int, str]
    pending: CheckpointContent | None


class AsyncSaver:
    """The saver process of this rank, as training uses it.

    Args:
        process: helper process that runs ``run_saver``.
        runtime: process group and device of this rank.
        store: store that gets the checkpoints. The saver keeps the run folder open while it may write; on rank 0 that
            includes the run's lock.
        retries: maximum number of attempts after a failed one.
        tiers: settings of snapshots and object store; None for neither.
        hang_seconds: seconds without a sign of life, while ranks wait for it, after which a saver is killed; None to
            wait for ever.
    """

    def __init__(
        self,
        process: HelperProcess,
        runtime: Runtime,
        store: CheckpointStore,
        retries: int,
        tiers: TierSettings | None = None,
        hang_seconds: float | None = None,
    ) -> None:
        self._process, self._runtime, self._hang_seconds = process, runtime, hang_seconds
        self._requested_at = time.monotonic()  # since when a sign of life is expected
        self._buffer: StagingBuffer | None = None
        self._pending: CheckpointContent | None = None  # submitted, without outcome; its chunks are in the buffer
        self._result: SaveResult | SnapshotResult | None = None  # result of the pending save
        self._has_remote = tiers is not None and tiers.config.remote is not None
        self._uploading = False  # True while the saver uploads what it has committed
        self._joined = False  # True once the saver has joined the savers' process group
        self._all_joined = False  # True once all savers have joined, or one is lost
        self._lost = ""  # why this rank's saver cannot continue; empty if it can
        settings = SaverSettings(
            runtime.rendezvous, store.root, store.keep_last, store.keep_every_steps, retries, tiers
        )
        folder = store.folder
        if folder is not None:
            settings = replace(settings, run_dir=folder.path, run_id=folder.run_id)
        self._send(settings, [] if folder is None else [folder.descriptor])

    def prepare(self, chunks: Sequence[TensorChunk]) -> None:
        """Allocate the staging buffer for chunks of these sizes, in the background."""
        size = buffer_bytes(self._chunks_to_write(chunks))
        try:
            self._buffer = StagingBuffer(size, self._runtime.device)
        except OSError as error:
            self._drop_saver(_no_memory_message(size, error))
        else:
            self._send(BufferMessage(), [self._buffer.descriptor])

    def submit(self, content: CheckpointContent, snapshot: bool = False) -> None:
        """Copy a state to the staging buffer and have it written. Returns after the copy. Collective.

        Call ``agree_on_outcome`` before.

        Args:
            content: the state of this rank.
            snapshot: write a snapshot instead of a checkpoint.
        """
        assert self._pending is None and self._buffer is not None, "the buffer is allocated and free"
        slots = self._buffer.fill(self._chunks_to_write(content.chunks))
        self._pending = replace(content, chunks=self._buffer.chunks(slots))
        self._requested_at = time.monotonic()
        self._send(SaveRequest(content.step, slots, content.meta, content.files, snapshot))

    def reports(self, wait: bool) -> Iterator[SaverReport]:
        """Yield the saver's new reports.

        Args:
            wait: wait for the result of the last save on all ranks. Collective, and to be read to its end.
        """
        if wait and self._pending is not None:
            return self._wait_for_all(lambda: self._result is not None)
        return self._receive(lambda: 0.0)

    def finish_uploads(self) -> Iterator[SaverReport]:
        """Wait until all savers have uploaded what the object store lacks; yield reports meanwhile. Collective."""
        return self._wait_for_all(lambda: not self._uploading)

    def _wait_for_all(self, is_done: Callable[[], bool], until_lost: bool = False) -> Iterator[SaverReport]:
        """Yield reports until every rank's saver is done or lost. Collective.

        Args:
            is_done: returns True if this rank's saver is done.
            until_lost: end once any saver is lost.
        """
        ranks, told = self._runtime.ranks, False
        while True:
            yield from self._receive(lambda: 0.0 if is_done() else _TICK)
            ended = bool(self._lost) or is_done()
            silence = None if ended else self._process.silence(self._requested_at)
            blocked = self._process.blocked_seconds if silence == 0 else 0.0
            states = ranks.all_gather((bool(self._lost), silence, blocked))
            if all(each is None for _, each, _ in states) or (until_lost and any(lost for lost, _, _ in states)):
                return
            if self._hang_seconds is None:
                advance()
                continue
            self._judge(silence, min(each for _, each, _ in states if each is not None))
            rank, longest = max(enumerate(blocked for _, _, blocked in states), key=lambda each: each[1])
            if longest > self._hang_seconds and not told:
                told = True
                yield SlowStorage(rank, longest)

    def _judge(self, silence: float | None, shortest: float) -> None:
        """Kill this rank's saver if it hangs; otherwise tell the watchdog that the wait is for living savers.

        A saver may be silent because it waits for another one. It hangs if it is stopped, or if all are silent.

        Args:
            silence: seconds without a sign of life of this rank's saver; None if it is done or lost.
            shortest: seconds without a sign of life of the least silent saver.
        """
        limit = self._hang_seconds
        assert limit is not None, "without a limit nothing is judged"
        if silence is not None and silence > limit and (shortest > limit or is_stopped(self._process.pid)):
            what = "was stopped by a signal" if is_stopped(self._process.pid) else "made no progress"
            self._drop_saver(f"{what} for {silence:.0f} s (recovery.hang_seconds={limit:g})")
        if shortest <= limit:
            advance()

    def _receive(self, seconds: Callable[[], float | None]) -> Iterator[SaverReport]:
        """Yield reports from the saver until none arrives for ``seconds()``; None blocks."""
        while not self._lost:
            try:
                received = self._process.channel.receive(seconds())
            except EOFError:
                self._drop_saver(f"ended with exit code {self._process.wait()}")
                return
            if received is None:
                return
            message: SaverReport | SaverFailed | SaverJoined | UploadsDone = received[0]
            if isinstance(message, SaverFailed):
                self._drop_saver(message.reason)
                return
            if isinstance(message, SaverJoined):
                self._joined = True
                continue
            if isinstance(message, UploadsDone):
                self._uploading = False
                continue
            if isinstance(message, SaveResult | SnapshotResult):
                self._result = message
                self._uploading = self._has_remote and isinstance(message, SaveResult) and message.path is not None
            yield message

    def agree_on_outcome(self) -> SaveOutcome:
        """Agree with the other ranks on the outcome of the last save. Collective; read all ``reports`` before.

        A state submitted after this is written even if this process ends at once.
        """
        if not self._all_joined:  # the rendezvous timeout is long: the loss of a saver is not waited out
            early = list(self._wait_for_all(lambda: self._joined, until_lost=True))
            assert all(isinstance(each, SlowStorage) for each in early), "nothing has been requested yet"
            self._all_joined = True
        if self._buffer is not None:
            try:
                with blocking_call():  # a terabyte takes its time
                    self._buffer.wait()
            except OSError as error:
                self._drop_saver(_no_memory_message(self._buffer.size, error))
        outcomes = self._runtime.ranks.all_gather((self._lost, self._result))
        result = next((result for _, result in outcomes if result is not None), None)
        lost = {rank: reason for rank, (reason, _) in enumerate(outcomes) if reason}
        pending = self._pending if result is None else None
        self._pending = self._result = None
        return SaveOutcome(result, lost, pending)

    def kill(self) -> None:
        """Kill the saver. It writes nothing after this returns."""
        self._process.kill()

    def _chunks_to_write(self, chunks: Sequence[TensorChunk]) -> list[TensorChunk]:
        """Filter the chunks that this rank's saver writes."""
        return [chunk for chunk in chunks if self._runtime.ranks.is_first or not chunk.replicated]

    def _send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        with suppress(EOFError):  # its last messages are read by ``reports``
            self._process.channel.send(message, descriptors)

    def _drop_saver(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._process.kill()


def _no_memory_message(size: int, error: OSError) -> str:
    return f"not enough memory for a copy of the state, {size} bytes ({error.strerror})"
