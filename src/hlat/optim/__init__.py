"""The optimizer: AdamW, over fp32 or bf16 weights, and learning-rate schedules."""

from hlat.optim.adamw import build_optimizer, prepare, set_learning_rate, state_tensors
from hlat.optim.schedule import learning_rate

__all__ = ["build_optimizer", "learning_rate", "prepare", "set_learning_rate", "state_tensors"]
