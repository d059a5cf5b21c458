"""The state of a run on disk: when it is saved, checked and gone back to."""

from hlat.training.saving.checkpointing import Saving, background_saver, saver_beside
from hlat.training.saving.corruption_check import Integrity
from hlat.training.saving.rollback import roll_back

__all__ = ["Integrity", "Saving", "background_saver", "roll_back", "saver_beside"]
