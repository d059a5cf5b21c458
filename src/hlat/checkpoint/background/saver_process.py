"""The saver process, a helper process of each rank that writes its checkpoints.

    SaverSettings, run lock --> joins the other savers, SaverJoined       BufferMessage --> the shared staging buffer
    SaveRequest --store.save, with all savers--> FailedAttempt, ..., SaveResult        or SaverFailed
                                                 TierEvent, ..., UploadsDone, if there is an object store
                --a snapshot, if requested-----> SnapshotResult

The savers of all ranks have a process group of their own. They commit checkpoints together, by the same protocol as
ranks do. If the training process ends, its saver finishes the requested save and exits: the checkpoint becomes
complete, or does not exist.
"""

import os
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import torch

from hlat.checkpoint.background.staging_buffer import Slot, attach_buffer, chunks_in
from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.protocol.commit import CheckpointContent
from hlat.checkpoint.protocol.retry import FailedAttempt, SaveResult, save_with_retries
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.checkpoint.tiers.run_tiers import SnapshotResult, TierEvent, Tiers, TierSettings
from hlat.runtime.distributed.helper_process import Channel
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.join import join_helpers
from hlat.runtime.distributed.rendezvous import Rendezvous
from hlat.runtime.errors import HlatError
from hlat.runtime.process.progress import ProgressRecord, blocking_call
from hlat.runtime.rank_env import RankInfo
from hlat.runtime.storage.run_folder import RunFolder

# Limit for finishing a save after the run has ended, in seconds without progress: the next run waits for the lock.
_LINGER_SECONDS = 600.0


@dataclass(frozen=True)
class SaverSettings:
    """Settings of the saver process, sent with an open descriptor of the run folder; on rank 0, of the run's lock.

    The saver keeps the descriptor open as long as it lives.

    Attributes:
        rendezvous: rendezvous of the savers' process group.
        root: checkpoints folder.
        keep_last: number of newest checkpoints to keep.
        keep_every_steps: checkpoints at multiples of this step are kept for ever; None for no such rule.
        retries: maximum number of attempts after a failed one.
        tiers: settings of snapshots and object store; None for neither.
        run_dir: run folder; None outside a run.
        run_id: id of the run; None outside a run.
    """

    rendezvous: Rendezvous
    root: Path
    keep_last: int
    keep_every_steps: int | None
    retries: int
    tiers: TierSettings | None = None
    run_dir: Path | None = None
    run_id: str | None = None


@dataclass(frozen=True)
class BufferMessage:
    """Message sent with the descriptor of the staging buffer that the following requests refer to."""


@dataclass(frozen=True)
class SaveRequest:
    """Request to write a checkpoint, or a snapshot, of the present content of the staging buffer."""

    step: int
    slots: list[Slot]
    meta: Mapping[str, Any]
    files: Mapping[str, Path]
    snapshot: bool = False


@dataclass(frozen=True)
class UploadsDone:
    """Message that the uploads to the object store are done; earlier reports name those that failed."""


@dataclass(frozen=True)
class SaverJoined:
    """Message that all savers have joined: what is requested from now on is written even if training ends."""


@dataclass(frozen=True)
class SaverFailed:
    """Last message of a saver that cannot continue."""

    reason: str


def _open_run_folder(settings: SaverSettings, descriptors: list[int]) -> RunFolder | None:
    """Run folder behind the descriptor that training sent; None outside a run."""
    if settings.run_dir is None:
        return None
    return RunFolder(settings.run_dir, descriptors[0], settings.run_id)


def run_saver(channel: Channel, rank_info: RankInfo, make_disk: Callable[[], Disk]) -> None:
    """Write what training requests until it closes the channel.

    Args:
        channel: channel to the training process.
        rank_info: rank information of the training process.
        make_disk: creates the file-system operations.
    """
    torch.set_num_threads(1)  # the CPU cores are for training
    with suppress(EOFError):
        try:
            _Saver(channel, rank_info, make_disk).run()
        except (HlatError, RuntimeError) as error:  # another saver is lost, which its rank reports
            channel.send(SaverFailed(str(error).partition("\n")[0]))
        except Exception:
            channel.send(SaverFailed(traceback.format_exc()))


class _Saver:
    def __init__(self, channel: Channel, rank_info: RankInfo, make_disk: Callable[[], Disk]) -> None:
        self._channel, self._rank_info, self._make_disk = channel, rank_info, make_disk
        self._finishes = False  # True if work must be finished even if training ends
        self._joined = False  # nothing is requested before

    def run(self) -> None:
        self._channel.on_peer_exit(lambda: os._exit(1), self._linger_seconds)
        settings, run_descriptors = self._next()  # keeping them open holds the run's lock
        with blocking_call():  # other savers may start later
            ranks = join_helpers("savers", settings.rendezvous, self._rank_info)
        self._finishes = self._joined = True
        self._channel.send(SaverJoined())
        disk = self._make_disk()
        keep = settings.keep_last, settings.keep_every_steps
        store = CheckpointStore(
            settings.root, *keep, disk=disk, ranks=ranks, folder=_open_run_folder(settings, run_descriptors)
        )
        tiers = None if settings.tiers is None else settings.tiers.open(store, self._rank_info.node, ranks, disk)
        memory: mmap | None = None
        while True:
            request, descriptors = self._next()
            if isinstance(request, BufferMessage):
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
        """Upload what the object store lacks. If training ends meanwhile, the next run does the rest."""
        self._finishes = False
        for event in tiers.upload():
            self._report(event)
        self._report(UploadsDone())
        self._finishes = True

    def _next(self) -> tuple[Any, list[int]]:
        received = self._channel.receive()
        assert received is not None, "without a timeout, receive returns a message or raises EOFError"
        return received

    def _report(self, message: FailedAttempt | TierEvent | UploadsDone) -> None:
        with suppress(EOFError):  # training has ended; what it requested is written nevertheless
            self._channel.send(message)

    def _pause(self, ranks: HostGroup, seconds: float) -> bool:
        """Wait before the next attempt; return False on all ranks if the training process of any rank has ended."""
        try:
            with blocking_call():
                waited = self._channel.receive(seconds)
            assert waited is None, "training makes no request before the last one is answered"
            gone = False
        except EOFError:
            gone = True
        return not any(ranks.all_gather(gone))
