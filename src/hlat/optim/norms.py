"""Global L2 norms, and clipping by them: fused over all tensors, without a word to the host."""

from collections.abc import Iterable

import torch
from torch import nn


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """L2 norm over all gradients together: a scalar on their device."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=None)


def parameter_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """L2 norm over all parameters together: a scalar on their device."""
    return torch.nn.utils.get_total_norm([p.detach() for p in parameters], foreach=None)


def clip_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, limit: float) -> None:
    """Scale the gradients in place by min(1, limit / norm), where ``norm`` is what ``gradient_norm`` returned."""
    torch.nn.utils.clip_grads_with_norm_(list(parameters), limit, norm)
