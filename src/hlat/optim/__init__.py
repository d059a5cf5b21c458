"""The optimizer: AdamW, learning-rate schedules, gradient norms and clipping."""

from hlat.optim.adamw import build_optimizer, set_learning_rate
from hlat.optim.norms import clip_gradients, gradient_norm, parameter_norm
from hlat.optim.schedule import learning_rate

__all__ = [
    "build_optimizer",
    "clip_gradients",
    "gradient_norm",
    "learning_rate",
    "parameter_norm",
    "set_learning_rate",
]
