"""The two modes there are, as a context for the forward pass."""

import torch

from hlat.config import PrecisionConfig


def compute_dtype(config: PrecisionConfig) -> torch.dtype:
    """Dtype of the matrix products."""
    return torch.bfloat16 if config.mode == "mixed" else torch.float32


def autocast(config: PrecisionConfig, device: torch.device) -> torch.autocast:
    """Context, and decorator, in which the forward pass runs; weights and their gradients stay fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.mode == "mixed")
