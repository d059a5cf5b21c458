"""The optimizer: AdamW and learning-rate schedules."""

from hlat.optim.adamw import build_optimizer, set_learning_rate
from hlat.optim.schedule import learning_rate

__all__ = ["build_optimizer", "learning_rate", "set_learning_rate"]
