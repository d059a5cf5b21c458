"""Further copies of a run's state: snapshots on local disks, and checkpoints in an object store."""

from hlat.checkpoint.tiers.object_store import ObjectStoreClient
from hlat.checkpoint.tiers.remote_reader import (
    BAD_MARKER_NAME,
    RemoteManifest,
    list_remote_folders,
    read_remote_manifest,
    verify_remote,
)
from hlat.checkpoint.tiers.run_id import RunId
from hlat.checkpoint.tiers.run_tiers import SnapshotResult, TierEvent, Tiers, TierSettings

__all__ = [
    "BAD_MARKER_NAME",
    "ObjectStoreClient",
    "RemoteManifest",
    "RunId",
    "SnapshotResult",
    "TierEvent",
    "TierSettings",
    "Tiers",
    "list_remote_folders",
    "read_remote_manifest",
    "verify_remote",
]
