"""Tiers of a run's state: its checkpoints folder, snapshots on local disks, an object store; and the newest of them.

start:         folder, snapshots, object store --newest valid state--> a checkpoint in the folder --> loaded
checkpoint:    folder --checkpoints that the store lacks--> object store                 (``remote_tier.py``)
periodically:  state --> snapshots                                                       (``snapshots.py``)
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.object_store import ObjectStoreClient
from hlat.checkpoint.protocol.commit import CheckpointContent
from hlat.checkpoint.protocol.reader import Checkpoint, step_folder_name, step_of_path
from hlat.checkpoint.protocol.store import CheckpointStore, DamageHandler, log_damage
from hlat.checkpoint.remote_tier import RemoteTier
from hlat.checkpoint.run_id import RunId
from hlat.checkpoint.snapshots import SnapshotTier
from hlat.config import CheckpointConfig
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import CheckpointError, StorageError


@dataclass(frozen=True)
class TierEvent:
    """An upload, download or promotion of a state, or the failure of one."""

    kind: str  # ``remote``, ``remote_failed``, ``fetched`` or ``promoted``; also the kind of the event in events.jsonl
    step: int | None  # None if the event is not about a single state
    message: str  # for the user; the URL for ``remote``
    seconds: float = 0.0


@sendable
@dataclass(frozen=True)
class SnapshotResult:
    """Outcome of writing a snapshot, which is not retried."""

    step: int
    name: str | None  # None if it failed
    seconds: float
    message: str = ""  # why it failed


@dataclass(frozen=True)
class TierSettings:
    """Settings from which a saver process opens the tiers of its run."""

    config: CheckpointConfig
    run_dir: Path
    name: str

    def open(self, store: "CheckpointStore", node: int, ranks: HostGroup, disk: Disk) -> "Tiers":
        """Open the tiers in a process that writes to them and does not read; errors as ``Tiers``."""
        return Tiers(self.config, store, RunId(self.run_dir, self.name), node, ranks, disk=disk)


class Tiers:
    """The tiers of one run, for its processes. All methods are collective.

    ``on_damage`` is called on rank 0 with each damaged checkpoint or rank part.

    Raises:
        CheckpointError: the object store has the checkpoints of another run.
        StorageError: a disk failed; or the object store failed while the run folder has no run id, which must come from
            the store.
        LaunchError: several machines share the folder of the snapshots.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        store: CheckpointStore,
        run_id: RunId,
        node: int,
        ranks: HostGroup,
        *,
        on_damage: DamageHandler = log_damage,
        disk: Disk | None = None,
        make_client: Callable[[str, int], ObjectStoreClient] = ObjectStoreClient,
    ) -> None:
        self._store, self._run_id, self._ranks = store, run_id, ranks
        self.events: list[TierEvent] = []  # uploads, downloads, promotions and failures so far
        self._remote: RemoteTier | None = None
        self._snapshots: SnapshotTier | None = None
        if config.remote is not None:
            keep = config.keep_last, config.keep_every_steps
            client = make_client(config.remote, config.retries)
            self._remote = RemoteTier(client, ranks, run_id, *keep, on_damage=on_damage, disk=disk)
            self._claim(self._remote)  # before anything else needs the run id, which this may set
        if config.local is not None:
            local = config.local
            self._snapshots = SnapshotTier(
                local.dir, ranks, run_id, node, copies=local.replicate, on_damage=on_damage, disk=disk
            )

    @property
    def warning(self) -> str:
        return self._snapshots.warning if self._snapshots is not None else ""

    def newest(self, require_step: int | None = None) -> Checkpoint | None:
        """Open the newest valid state of all tiers, as a checkpoint in the run's folder; None if there never was one.

        ``events`` gets the tier that it came from. If the folder has step ``require_step`` or a later one, no other
        tier is read. CheckpointError as ``CheckpointStore.newest``; StorageError if a disk failed, or the object store
        did and no other tier has a state.
        """
        if require_step is None:
            step = local = self._store.newest_step()
        else:
            step = local = self._ranks.run_on_rank0(lambda: max(self._store.steps(), default=None))
            if step is not None and step >= require_step:
                return self._store.newest(require_step)
        if self._snapshots is not None:
            # Before the object store: a newer local state saves the download.
            promoted = self._snapshots.promote(self._store, step)
            if promoted is not None:
                step = promoted
                self._add_event("promoted", step, f"the snapshot of step {step} became a checkpoint")
        if self._remote is not None:
            step = self._fetch(self._remote, step)
        if require_step is None and step is not None and step == local:
            return self._store.open(step)
        return self._store.newest(require_step)

    def upload(self) -> list[TierEvent]:
        """Upload what the object store lacks, and prune it; return an event per upload or failure."""
        if self._remote is None:
            return []
        # Failures are events, not errors: they are tried again at the next call.
        events: list[TierEvent] = []
        step = None
        try:
            for folder in self._remote.missing(self._store.root):
                step = step_of_path(folder)
                if not self._upload_checkpoint(self._remote, folder, events):
                    return events
            step = None
            self._remote.prune()
        except (StorageError, CheckpointError) as error:
            events.append(TierEvent("remote_failed", step, str(error)))
        return events

    def snapshot(self, content: CheckpointContent) -> SnapshotResult:
        """Write a snapshot. A failure is not retried, because the next snapshot follows soon."""
        assert self._snapshots is not None, "the run has a tier of snapshots"
        begin, name, message = time.monotonic(), None, ""
        try:
            name = self._snapshots.write(content.step, content.chunks, content.meta, content.files)
        except StorageError as error:
            message = str(error)
        return SnapshotResult(content.step, name, time.monotonic() - begin, message)

    def clear_snapshots(self) -> None:
        if self._snapshots is not None:
            self._snapshots.clear()

    def _claim(self, remote: RemoteTier) -> None:
        try:
            remote.claim()
        except StorageError as error:
            # The id has to come from the store then: with a new one this would be another run.
            if self._ranks.run_on_rank0(self._run_id.stored) is None:
                raise
            self._add_event("remote_failed", None, str(error))

    def _fetch(self, remote: RemoteTier, newer_than: int | None) -> int | None:
        begin = time.monotonic()
        try:
            step = remote.fetch_newest(self._store.root, newer_than)
        except StorageError as error:
            # No other tier has a state: starting over would hide the loss.
            if newer_than is None:
                raise
            self._add_event(
                "remote_failed", None, f"resuming from step {newer_than} without checking the object store: {error}"
            )
            return newer_than
        if step is None:
            return newer_than
        seconds = time.monotonic() - begin
        self._add_event(
            "fetched", step, f"the checkpoint of step {step} came from {remote.url_of(step_folder_name(step))}", seconds
        )
        return step

    def _upload_checkpoint(self, remote: RemoteTier, folder: Path, events: list[TierEvent]) -> bool:
        """Upload a checkpoint; return False if the store is unavailable, so that no other upload is tried."""
        begin, step = time.monotonic(), step_of_path(folder)
        try:
            url = remote.upload(folder)
        except (StorageError, CheckpointError) as error:
            events.append(TierEvent("remote_failed", step, str(error), time.monotonic() - begin))
            unavailable = isinstance(error, StorageError)
            return not self._ranks.broadcast(unavailable)  # errors may differ between ranks: rank 0 decides
        events.append(TierEvent("remote", step, url, time.monotonic() - begin))
        return True

    def _add_event(self, kind: str, step: int | None, message: str, seconds: float = 0.0) -> None:
        self.events.append(TierEvent(kind, step, message, seconds))
