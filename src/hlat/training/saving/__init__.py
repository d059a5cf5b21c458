"""Saving the state of a run: checkpoints, snapshots and exports, the corruption check before them, rollback to them."""

from hlat.training.saving.checkpointing import Checkpointer, background_saver, saver_process
from hlat.training.saving.corruption_check import CorruptionCheck
from hlat.training.saving.exports import WeightExports
from hlat.training.saving.rollback import roll_back

__all__ = ["Checkpointer", "CorruptionCheck", "WeightExports", "background_saver", "roll_back", "saver_process"]
