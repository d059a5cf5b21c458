"""Where the state of a run is kept besides the checkpoints in its folder, and which of all these is the newest.

start:       folder, snapshots, object store --newest that is whole--> a checkpoint in the folder --> loaded
checkpoint:  folder --what the store lacks--> object store
now and then: state --> snapshots
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hlat.checkpoint.format import Disk
from hlat.checkpoint.protocol import (
    Checkpoint,
    CheckpointContent,
    CheckpointStore,
    DamageHandler,
    log_damage,
    step_folder_name,
    step_of_path,
)
from hlat.checkpoint.tiers.object_store import ObjectStoreClient
from hlat.checkpoint.tiers.remote_tier import RemoteTier
from hlat.checkpoint.tiers.run_id import RunId
from hlat.checkpoint.tiers.snapshots import SnapshotTier
from hlat.config.sections import CheckpointConfig
from hlat.runtime import CheckpointError, StorageError
from hlat.runtime.distributed import HostGroup, sendable


@dataclass(frozen=True)
class TierEvent:
    """Something that happened to a state elsewhere than in the run's folder.

    Attributes:
        kind: ``remote``, ``remote_failed``, ``fetched`` or ``promoted``: also the name of the event.
        step: of the state; None where no single one is meant.
        message: for people.
        seconds: that it took.
    """

    kind: str
    step: int | None
    message: str
    seconds: float = 0.0


@sendable
@dataclass(frozen=True)
class SnapshotResult:
    """What came of a snapshot."""

    step: int
    name: str | None  # None: there is no such snapshot
    seconds: float
    message: str = ""  # why there is none


@dataclass(frozen=True)
class TierSettings:
    """What the processes beside a run have to know of its tiers."""

    config: CheckpointConfig
    run_dir: Path
    name: str

    def open(self, store: "CheckpointStore", node: int, ranks: HostGroup, disk: Disk) -> "Tiers":
        """The tiers, for processes that write and do not read; see ``Tiers``."""
        return Tiers(self.config, store, RunId(self.run_dir, self.name), node, ranks, disk=disk)


class Tiers:
    """The tiers of one run, for its processes. Its methods are collective.

    Args:
        config: names the tiers.
        store: the run's folder of checkpoints.
        owner: the run.
        node: the number of this machine.
        ranks: the processes of the run.
        on_damage: told, on rank 0, of what is damaged.
        disk: the local file system's operations.
        objects: reaches the object store.

    Raises:
        CheckpointError: the object store holds another run's checkpoints.
        StorageError: a disk refused, or the object store did, where this run cannot be known without it.
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
        self.events: list[TierEvent] = []
        self._remote: RemoteTier | None = None
        self._snapshots: SnapshotTier | None = None
        if config.remote is not None:
            keep = config.keep_last, config.keep_every_steps
            client = make_client(config.remote, config.retries)
            self._remote = RemoteTier(client, ranks, run_id, *keep, on_damage=on_damage, disk=disk)
            self._claim(self._remote)  # before anything else needs the number of the run
        if config.local is not None:
            local = config.local
            self._snapshots = SnapshotTier(
                local.dir, ranks, run_id, node, copies=local.replicate, on_damage=on_damage, disk=disk
            )

    @property
    def warning(self) -> str:
        """What the user should know of the tiers; empty if nothing."""
        return self._snapshots.warning if self._snapshots is not None else ""

    def newest(self, require_step: int | None = None) -> Checkpoint | None:
        """The newest state that is whole, as a checkpoint in the run's folder; None if there never was one.

        ``notes`` tells where it came from. A store that does not answer is passed over where there is a state without.

        Args:
            require_step: as for ``CheckpointStore.newest``. Where the folder has this step, or a later one, it alone
                decides.

        Raises:
            CheckpointError: there were checkpoints, and nothing is whole; or the newest is not of the required step.
            StorageError: a disk refused, or nothing is known without the object store, which does not answer.
        """
        if require_step is None:
            step = local = self._store.newest_step()
        else:
            step = local = self._ranks.run_on_rank0(lambda: max(self._store.steps(), default=None))
            if step is not None and step >= require_step:
                return self._store.newest(require_step)
        if self._snapshots is not None:
            promoted = self._snapshots.promote(self._store, step)
            if promoted is not None:
                step = promoted
                self._note("promoted", step, f"the snapshot of step {step} became a checkpoint")
        if self._remote is not None:
            step = self._fetch(self._remote, step)
        if require_step is None and step is not None and step == local:
            return self._store.open(step)
        return self._store.newest(require_step)

    def upload(self) -> list[TierEvent]:
        """Bring the object store up to date with the run's folder; what does not succeed is tried the next time."""
        if self._remote is None:
            return []
        notes: list[TierEvent] = []
        step = None
        try:
            for folder in self._remote.missing(self._store.root):
                step = step_of_path(folder)
                if not self._upload_one(self._remote, folder, notes):
                    return notes
            step = None
            self._remote.prune()
        except (StorageError, CheckpointError) as error:
            notes.append(TierEvent("remote_failed", step, str(error)))
        return notes

    def snapshot(self, content: CheckpointContent) -> SnapshotResult:
        """Write a snapshot, once: the next one will come soon."""
        assert self._snapshots is not None, "the run has such a tier"
        begin, name, message = time.monotonic(), None, ""
        try:
            name = self._snapshots.write(content.step, content.chunks, content.meta, content.files)
        except StorageError as error:
            message = str(error)
        return SnapshotResult(content.step, name, time.monotonic() - begin, message)

    def clear_snapshots(self) -> None:
        """Remove the snapshots: the state of the last step is in a checkpoint."""
        if self._snapshots is not None:
            self._snapshots.clear()

    def _claim(self, remote: RemoteTier) -> None:
        try:
            remote.claim()
        except StorageError as error:
            if self._ranks.run_on_rank0(self._run_id.stored) is None:
                raise
            self._note("remote_failed", None, str(error))

    def _fetch(self, remote: RemoteTier, newer_than: int | None) -> int | None:
        begin = time.monotonic()
        try:
            step = remote.fetch_newest(self._store.root, newer_than)
        except StorageError as error:
            if newer_than is None:
                raise
            self._note("remote_failed", None, f"going on from step {newer_than}, without a look at the store: {error}")
            return newer_than
        if step is None:
            return newer_than
        seconds = time.monotonic() - begin
        self._note(
            "fetched", step, f"the checkpoint of step {step} came from {remote.url_of(step_folder_name(step))}", seconds
        )
        return step

    def _upload_one(self, remote: RemoteTier, folder: Path, notes: list[TierEvent]) -> bool:
        """Upload a checkpoint; False if the store is away, so that others need not be tried."""
        begin, step = time.monotonic(), step_of_path(folder)
        try:
            url = remote.upload(folder)
        except (StorageError, CheckpointError) as error:
            notes.append(TierEvent("remote_failed", step, str(error), time.monotonic() - begin))
            away = isinstance(error, StorageError)
            return not self._ranks.broadcast(away)  # each rank may have an error of its own: rank 0 decides for all
        notes.append(TierEvent("remote", step, url, time.monotonic() - begin))
        return True

    def _note(self, kind: str, step: int | None, message: str, seconds: float = 0.0) -> None:
        self.events.append(TierEvent(kind, step, message, seconds))
