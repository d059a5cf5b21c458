"""Optimizers (AdamW for fp32 or bf16 weights) and learning-rate schedules."""

from hlat.optim.adamw import allocate_state, build_optimizer, set_learning_rate, state_tensors
from hlat.optim.schedule import learning_rate

__all__ = ["allocate_state", "build_optimizer", "learning_rate", "set_learning_rate", "state_tensors"]
