"""Other places for the state of a run: snapshots on each machine, and checkpoints in an object store."""

from hlat.checkpoint.tiers.object_store import Objects
from hlat.checkpoint.tiers.remote_reader import SET_ASIDE, Vouched, remote_folders, remote_manifest, remote_problems
from hlat.checkpoint.tiers.run_id import Owner
from hlat.checkpoint.tiers.run_tiers import SnapshotResult, TierNote, Tiers, TierSettings

__all__ = [
    "SET_ASIDE",
    "Objects",
    "Owner",
    "SnapshotResult",
    "TierNote",
    "TierSettings",
    "Tiers",
    "Vouched",
    "remote_folders",
    "remote_manifest",
    "remote_problems",
]
