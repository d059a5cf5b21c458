"""What the process does that stands beside a rank and writes its checkpoints.

    Settings, run lock --> joins the other savers, Joined   Memory --> the copy that they share
    Order --store.save, as all savers together--> Refusal, ..., SaveResult               or Farewell
                                                  TierEvent, ..., CaughtUp, where there is an object store
          --a snapshot, where that is asked for--> SnapshotResult

The savers of all ranks are a world of their own. What they write together they commit together, by the same protocol
as ranks do. When its trainer has gone, a saver finishes what has been ordered and leaves: a checkpoint becomes whole,
or nothing.
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
from hlat.checkpoint.format import Disk
from hlat.checkpoint.protocol import CheckpointContent, CheckpointStore, FailedAttempt, SaveResult, save_with_retries
from hlat.checkpoint.tiers import SnapshotResult, TierEvent, Tiers, TierSettings
from hlat.runtime import HlatError, RankInfo
from hlat.runtime.distributed import Channel, HostGroup, Rendezvous, join_helpers
from hlat.runtime.storage import RunFolder

_LINGERING = 600.0  # seconds in which a save is finished that outlives its run: others wait for the run's lock


@dataclass(frozen=True)
class SaverSettings:
    """Settings of the saver process. With them comes a descriptor that holds the run's folder for as long as the saver
    lives: on rank 0 that of the run's lock.
    """

    meeting: Rendezvous
    root: Path
    keep_last: int
    keep_every_steps: int | None
    retries: int
    tiers: TierSettings | None = None
    run_dir: Path | None = None
    number: str | None = None


@dataclass(frozen=True)
class BufferMessage:
    """With it comes the memory that the following copies lie in."""


@dataclass(frozen=True)
class SaveRequest:
    """A checkpoint, or a snapshot, to be written of what lies in the memory now."""

    step: int
    slots: list[Slot]
    meta: Mapping[str, Any]
    files: Mapping[str, Path]
    snapshot: bool = False


@dataclass(frozen=True)
class UploadsDone:
    """The object store has what it is to have, or the notes before this say why not."""


@dataclass(frozen=True)
class SaverJoined:
    """The savers have found each other: what is ordered from here on is written, whatever becomes of the trainers."""


@dataclass(frozen=True)
class SaverFailed:
    """The saver's last word: why it cannot go on."""

    message: str


def _folder(settings: SaverSettings, held: list[int]) -> RunFolder | None:
    """The run's folder, as the trainer holds it."""
    if settings.run_dir is None:
        return None
    return RunFolder(settings.run_dir, held[0], settings.number)


def run_saver(line: Channel, here: RankInfo, make_disk: Callable[[], Disk]) -> None:
    """Write what is ordered until the line ends.

    Args:
        line: to the trainer.
        here: the trainer's place in its run.
        make_disk: the disk to write to.
    """
    torch.set_num_threads(1)  # what computes is the trainer
    with suppress(EOFError):
        try:
            _Saver(line, here, make_disk).run()
        except (HlatError, RuntimeError) as error:  # another saver has gone, as the trainers will hear
            line.send(SaverFailed(str(error).partition("\n")[0]))
        except Exception:
            line.send(SaverFailed(traceback.format_exc()))


class _Saver:
    def __init__(self, line: Channel, here: RankInfo, make_disk: Callable[[], Disk]) -> None:
        self._line, self._here, self._make_disk = line, here, make_disk
        self._finishes = False  # whether there is something to be finished, should the trainer go
        self._joined = False  # before that nothing can have been ordered

    def run(self) -> None:
        self._line.on_peer_exit(lambda: os._exit(1), self._lingering)
        settings, held = self._next()  # the lock is held by being open
        ranks = join_helpers("savers", settings.meeting, self._here)
        self._finishes = self._joined = True
        self._line.send(SaverJoined())
        disk = self._make_disk()
        keep = settings.keep_last, settings.keep_every_steps
        store = CheckpointStore(settings.root, *keep, disk=disk, ranks=ranks, folder=_folder(settings, held))
        tiers = None if settings.tiers is None else settings.tiers.open(store, self._here.node, ranks, disk)
        memory: mmap | None = None
        while True:
            order, descriptors = self._next()
            if isinstance(order, BufferMessage):
                memory = attach_buffer(*descriptors)
                continue
            assert memory is not None, "what is to be written lies in it"
            content = CheckpointContent(order.step, chunks_in(memory, order.slots), order.meta, order.files)
            result: SaveResult | SnapshotResult
            if order.snapshot:
                assert tiers is not None, "there is a tier of snapshots"
                result = tiers.snapshot(content)
            else:
                result = save_with_retries(
                    store, content, settings.retries, self._tell, lambda s: self._pause(ranks, s)
                )
            del content  # its views would keep the memory
            self._line.send(result)
            if tiers is not None and isinstance(result, SaveResult) and result.path is not None:
                self._copy(tiers)

    def _lingering(self) -> float:
        ordered = self._joined and self._line.has_unread()
        return _LINGERING if self._finishes or ordered else 0.0

    def _copy(self, tiers: Tiers) -> None:
        """Bring the object store up to date. What a trainer's end breaks off is done with the next checkpoint."""
        self._finishes = False
        for note in tiers.upload():
            self._tell(note)
        self._tell(UploadsDone())
        self._finishes = True

    def _next(self) -> tuple[Any, list[int]]:
        received = self._line.receive()
        assert received is not None, "without a limit of time there is a message, or the end of the line"
        return received

    def _tell(self, message: FailedAttempt | TierEvent | UploadsDone) -> None:
        with suppress(EOFError):  # the trainer has gone: what it ordered before is written all the same
            self._line.send(message)

    def _pause(self, ranks: HostGroup, seconds: float) -> bool:
        """Wait, unless there is nobody any more for whom to try again."""
        try:
            waited = self._line.receive(seconds)
            assert waited is None, "nothing is ordered before the last order is answered"
            gone = False
        except EOFError:
            gone = True
        return not any(ranks.all_gather(gone))
