"""Asynchronous saving: a helper process of each rank writes its checkpoints, while the rank trains.

    rank     SaverSettings, run lock -----------------------------> saver     joins the other savers: SaverSignal.JOINED
             chunks --copy--> staging buffer (``staging_buffer.py``), shared with the saver: SaverSignal.BUFFER
    submit   SaveRequest -----------------------------------------> saver --store.save, with all savers--> checkpoint
             training continues                                           --a snapshot, if requested--> snapshot
    reports  FailedAttempt, ..., SaveResult, or its error <-------- saver
             TierEvent, ..., SaverSignal.UPLOADED (object store), SnapshotResult
             signs of life of all savers --exchanged while ranks wait--> a saver without any is killed
    agree_on_outcome   result, lost savers --exchanged by all ranks--> SaveOutcome, the same on every rank

There is one staging buffer, so a save starts only after the previous one has its outcome. If a saver is lost, the copy
is still in the buffer, and the ranks can save it themselves.

The savers of all ranks have a process group of their own. They commit checkpoints together, by the same protocol as
ranks do. If the training process ends, its saver finishes the requested save and exits: the checkpoint becomes
complete, or does not exist.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from mmap import mmap
from pathlib import Path
from typing import Any

import torch

from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.format.tensor_files import TensorChunk
from hlat.checkpoint.protocol.commit import CheckpointContent
from hlat.checkpoint.protocol.store import CheckpointStore, FailedAttempt, SaveResult, save_with_retries
from hlat.checkpoint.staging_buffer import Slot, StagingBuffer, attach_buffer, buffer_bytes, chunks_in
from hlat.checkpoint.tiers import SnapshotResult, TierEvent, Tiers, TierSettings
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.join import Runtime, join_helpers
from hlat.runtime.distributed.rendezvous import Rendezvous
from hlat.runtime.errors import HlatError, first_line
from hlat.runtime.helper_process import Channel, HelperProcess, PeerEnded
from hlat.runtime.process import RankInfo, is_stopped
from hlat.runtime.progress import ProgressRecord, advance, blocking_call
from hlat.runtime.storage.run_folder import RunFolder

# Limit for finishing a save after the run has ended, in seconds without progress: the next run waits for the lock.
_LINGER_SECONDS = 600.0


@dataclass(frozen=True)
class SaverSettings:
    """Settings of the saver process, sent with an open descriptor of the run folder; on rank 0, of the run's lock.

    The saver keeps the descriptor open as long as it lives.
    """

    rendezvous: Rendezvous  # of the savers' process group
    root: Path  # checkpoints folder
    keep_last: int
    keep_every_steps: int | None  # checkpoints at its multiples are kept for ever
    retries: int  # attempts after a failed one, at most
    tiers: TierSettings | None = None  # None for neither snapshots nor object store
    run_dir: Path | None = None  # None outside a run
    run_id: str | None = None


@dataclass(frozen=True)
class SaveRequest:
    """Request to write a checkpoint, or a snapshot, of the present content of the staging buffer."""

    step: int
    slots: list[Slot]
    meta: Mapping[str, Any]
    files: Mapping[str, Path]
    snapshot: bool = False


class SaverSignal(Enum):
    """Messages without content."""

    BUFFER = "buffer"  # with the descriptor of the staging buffer that the following requests refer to
    JOINED = "joined"  # all savers have joined: what is requested from now on is written even if training ends
    UPLOADED = "uploaded"  # uploads to the object store are done; earlier reports name those that failed


def _open_run_folder(settings: SaverSettings, descriptors: list[int]) -> RunFolder | None:
    if settings.run_dir is None:
        return None
    # Identified by the open descriptor, so that a folder put in its place is noticed.
    return RunFolder(settings.run_dir, descriptors[0], settings.run_id)


def run_saver(channel: Channel, rank_info: RankInfo, make_disk: Callable[[], Disk]) -> None:
    """Write what training requests until it closes the channel; the entry of the saver process."""
    torch.set_num_threads(1)  # the CPU cores are for training
    _Saver(channel, rank_info, make_disk).run()


class _Saver:
    def __init__(self, channel: Channel, rank_info: RankInfo, make_disk: Callable[[], Disk]) -> None:
        self._channel, self._rank_info, self._make_disk = channel, rank_info, make_disk
        self._finishes = False  # True if work must be finished even if training ends
        self._joined = False  # nothing is requested before

    def run(self) -> None:
        # Before joining: the saver must not outlive training while it waits for the other savers.
        self._channel.on_parent_exit(lambda: os._exit(1), self._linger_seconds)
        settings, run_descriptors = self._channel.receive()  # keeping them open holds the run's lock
        with blocking_call():  # other savers may start later
            ranks = join_helpers("savers", settings.rendezvous, self._rank_info)
        self._finishes = self._joined = True
        self._channel.send(SaverSignal.JOINED)
        disk = self._make_disk()
        keep = settings.keep_last, settings.keep_every_steps
        store = CheckpointStore(
            settings.root, *keep, disk=disk, ranks=ranks, folder=_open_run_folder(settings, run_descriptors)
        )
        tiers = None if settings.tiers is None else settings.tiers.open(store, self._rank_info.node, ranks, disk)
        memory: mmap | None = None
        while True:
            request, descriptors = self._channel.receive()
            if request is SaverSignal.BUFFER:
                memory = attach_buffer(*descriptors)
                continue
            assert memory is not None, "the buffer is sent before the first request"
            content = CheckpointContent(request.step, chunks_in(memory, request.slots), request.meta, request.files)
            result: SaveResult | SnapshotResult
            if request.snapshot:
                assert tiers is not None, "the run has a tier of snapshots"
                result = tiers.snapshot(content)
            else:
                result = save_with_retries(
                    store, content, settings.retries, self._report, lambda s: self._pause(ranks, s)
                )
            del content  # its views would keep the buffer in memory
            self._channel.send(result)
            if tiers is not None and isinstance(result, SaveResult) and result.path is not None:
                self._upload(tiers)

    def _linger_seconds(self) -> float:
        requested = self._joined and self._channel.has_unread()
        return _LINGER_SECONDS - ProgressRecord.silence_here() if self._finishes or requested else 0.0

    def _upload(self, tiers: Tiers) -> None:
        # If training ends meanwhile, the next run uploads the rest.
        self._finishes = False
        for event in tiers.upload():
            self._report(event)
        self._report(SaverSignal.UPLOADED)
        self._finishes = True

    def _report(self, message: FailedAttempt | TierEvent | SaverSignal) -> None:
        with suppress(PeerEnded):  # training has ended; what it requested is written nevertheless
            self._channel.send(message)

    def _pause(self, ranks: HostGroup, seconds: float) -> bool:
        """Wait before the next attempt; return False on all ranks if the training process of any rank has ended."""
        try:
            with blocking_call():
                waited = self._channel.receive_within(seconds)
            assert waited is None, "training makes no request before the last one is answered"
            gone = False
        except PeerEnded:
            gone = True
        # All savers stop together: a save is collective.
        return not any(ranks.all_gather(gone))


_REPORT_SECONDS = 0.5  # seconds that a rank waits for its own saver before it exchanges with the others


@dataclass(frozen=True)
class SlowStorage:
    """Observation that a saver has waited for its storage for long; it goes on when that answers."""

    rank: int
    seconds: float


SaverReport = FailedAttempt | SaveResult | SnapshotResult | TierEvent | SlowStorage
"""Message of a saver process about its work, or an observation of it."""


@dataclass(frozen=True)
class SaveOutcome:
    """Outcome of a save; ``result`` and ``lost`` are the same on all ranks."""

    result: SaveResult | SnapshotResult | None  # of the last save; None if there was none, or if no rank knows it
    lost: dict[int, str]  # rank -> why its saver cannot continue; if any is lost, the caller kills all savers
    # content that this rank submitted, if no rank knows the result; its chunks are views of the staging buffer
    pending: CheckpointContent | None


class AsyncSaver:
    """The saver process of this rank, as training uses it.

    Args:
        process: helper process that runs ``run_saver``.
        runtime: process group and device of this rank.
        store: gets the checkpoints; the saver keeps its run folder open, and on rank 0 the run's lock.
        retries: maximum number of attempts after a failed one.
        tiers: settings of snapshots and object store; None for neither.
        hang_seconds: a saver without a sign of life for so long, while ranks wait for it, is killed; None: never.
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
        self._process.send(settings, [] if folder is None else [folder.descriptor])

    def prepare(self, chunks: Sequence[TensorChunk]) -> None:
        """Allocate the staging buffer for chunks of these sizes, in the background, in place of an earlier one."""
        self.close()
        size = buffer_bytes(self._chunks_to_write(chunks))
        try:
            self._buffer = StagingBuffer(size, self._runtime.device)
        except OSError as error:
            self._drop_saver(_no_memory_message(size, error))
        else:
            self._process.send(SaverSignal.BUFFER, [self._buffer.descriptor])

    def submit(self, content: CheckpointContent, snapshot: bool = False) -> None:
        """Copy a state to the staging buffer and have it written; returns after the copy. Collective."""
        # The caller has called ``agree_on_outcome``.
        assert self._pending is None and self._buffer is not None, "the buffer is allocated and free"
        slots = self._buffer.fill(self._chunks_to_write(content.chunks))
        self._pending = replace(content, chunks=self._buffer.chunks(slots))
        # After the copy: its seconds are not silence of the saver.
        self._requested_at = time.monotonic()
        self._process.send(SaveRequest(content.step, slots, content.meta, content.files, snapshot))

    def reports(self, wait: bool) -> Iterator[SaverReport]:
        """Yield the saver's new reports; ``wait``: until all ranks have the result (collective; read to the end)."""
        if wait and self._pending is not None:
            return self._wait_for_all(lambda: self._result is not None)
        return self._receive(lambda: 0.0)

    def finish_uploads(self) -> Iterator[SaverReport]:
        """Wait until all savers have uploaded what the object store lacks; yield reports meanwhile. Collective."""
        return self._wait_for_all(lambda: not self._uploading)

    def _wait_for_all(self, is_done: Callable[[], bool], until_lost: bool = False) -> Iterator[SaverReport]:
        """Yield reports until each rank's saver is done or lost; ``until_lost``: or any is lost. Collective."""
        ranks, told = self._runtime.ranks, False
        while True:
            yield from self._receive(lambda: 0.0 if is_done() else _REPORT_SECONDS)
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
        # A saver may be silent because it waits for another one. So it hangs if it is stopped, or if all are silent:
        # ``shortest`` is the silence of the least silent saver. While one lives, the watchdog is told of progress.
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
                message = self._process.receive(seconds())
            except PeerEnded as end:
                self._drop_saver(f"ended with exit code {end.code}")
                return
            except (HlatError, RuntimeError) as error:  # the second is a traceback, which ends with the error
                reason = first_line(error) if isinstance(error, HlatError) else str(error).strip().splitlines()[-1]
                self._drop_saver(f"ended with exit code 1: {reason}")
                return
            if message is None:
                return
            if message is SaverSignal.JOINED:
                self._joined = True
                continue
            if message is SaverSignal.UPLOADED:
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

    def close(self) -> None:
        """Free the staging buffer: behind an open descriptor, its memory would stay as long as this process."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def kill(self) -> None:
        """Kill the saver. It writes nothing after this returns."""
        self._process.kill()

    def _chunks_to_write(self, chunks: Sequence[TensorChunk]) -> list[TensorChunk]:
        # Every rank has the replicated chunks; rank 0 writes them.
        return [chunk for chunk in chunks if self._runtime.ranks.is_first or not chunk.replicated]

    def _drop_saver(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._process.kill()


def _no_memory_message(size: int, error: OSError) -> str:
    return f"not enough memory for a copy of the state, {size} bytes ({error.strerror})"
