"""Validation: the loss on a fixed set of sequences, and bits per byte, which compares across tokenizers."""

import math
from dataclasses import dataclass

import torch

from hlat.config import PrecisionConfig
from hlat.data import IGNORED, ValidationData
from hlat.model import Decoder
from hlat.precision import autocast
from hlat.training.loss import summed_cross_entropy


@dataclass(frozen=True)
class ValidationResult:
    """Averages over the validation set."""

    loss: float  # nats per token
    bits_per_byte: float  # total nats / (ln 2 * bytes of the text that the predicted tokens stand for)
    tokens: int


@torch.no_grad()
def validate(
    model: Decoder, data: ValidationData, precision: PrecisionConfig, device: torch.device, batch_size: int
) -> ValidationResult:
    """Mean next-token loss over the whole set, summed in float64 so that the batch size does not matter."""
    nats = torch.zeros((), dtype=torch.float64, device=device)
    tokens = text_bytes = 0
    for first in range(0, len(data), batch_size):
        batch = data.batch(first, batch_size)
        with autocast(precision, device):
            logits_BSV = model(batch.inputs_BS.to(device))
        nats += summed_cross_entropy(logits_BSV, batch.labels_BS.to(device)).double()
        tokens += int((batch.labels_BS != IGNORED).sum())
        text_bytes += batch.target_bytes
    total = float(nats)
    return ValidationResult(total / tokens, total / (math.log(2) * text_bytes), tokens)
