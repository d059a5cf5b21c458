"""AdamW over parameters, in two groups: decayed and not.

Decayed are matrices and embeddings. Norm weights and biases are decayed only where the recipe says so
(``optimizer.decay_norms``), as HLAT did; its paper found little difference.
"""

from collections.abc import Sequence

import torch
from torch import nn

from hlat.config import OptimizerConfig


def build_optimizer(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """torch's AdamW over what a process holds of the parameters, the fused kernel where the device has one.

    Its moments do not exist before the first step. The rate of a step is set by ``set_learning_rate``.
    """
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": config.weight_decay if config.decay_norms else 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=fused,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` for the next step, in every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
