"""Next-token cross-entropy, summed, in fp32."""

import torch
import torch.nn.functional as F

IGNORED = -100  # label of positions without a target, PyTorch's default ignore_index


def summed_cross_entropy(logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """Sum over all positions whose label is not ``IGNORED``: a scalar in nats, at least fp32.

    A sum, so that micro-batches and ranks can be added up and divided once by the tokens of the whole batch.
    """
    logits = logits_BSV.flatten(0, 1)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits, labels_BS.flatten(), ignore_index=IGNORED, reduction="sum")
