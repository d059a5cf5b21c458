"""Validation: the loss on a fixed set of sequences, and bits per byte, which compares across tokenizers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from hlat.data.samples import Batch, ValidationData
from hlat.model import IGNORED, Decoder
from hlat.parallel import MicroBatch, ParallelModel


@dataclass(frozen=True)
class ValidationResult:
    """Averages over the validation set."""

    loss: float  # nats per token
    bits_per_byte: float  # total nats / (ln 2 * bytes of the text that the predicted tokens stand for)
    tokens: int


class Evaluated(Protocol):
    """What can be validated: a model, or this rank's share of one."""

    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """This rank's term of the summed loss of whole sequences, on the CPU: float64, in nats."""

    def add_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks."""


class Alone:
    """A whole model in this process, for validation."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._device = next(model.parameters()).device

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Summed loss, added up in float64."""
        nats = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in batches:
            inputs_BS, labels_BS, positions_BS = batch.local(((0, batch.inputs_BS.shape[1]),), self._device)
            nats += self._model(inputs_BS, labels_BS, positions=positions_BS).double()
        return nats

    def add_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """There is nobody else."""
        return values


def validate(model: ParallelModel, data: ValidationData, batch_size: int) -> ValidationResult:
    """Mean next-token loss over the whole set. Collective: every rank gets the same result.

    The data-parallel ranks take micro-batches in turn. Where they do not come out even, the last ones are padded with
    sequences without a label, since every rank has to take part in every exchange.
    """
    ranks, index = model.layout.data, model.data_index
    rounds = -(-len(data) // (batch_size * ranks))
    batches = [data.batch((turn * ranks + index) * batch_size, batch_size) for turn in range(rounds)]
    return _averages(model, [_padded(batch, batch_size) for batch in batches], model.speaks)


def validate_alone(model: Decoder, data: ValidationData, batch_size: int) -> ValidationResult:
    """The same of a whole model in this process."""
    batches = [data.batch(first, batch_size) for first in range(0, len(data), batch_size)]
    return _averages(Alone(model), batches, True)


def _averages(model: Evaluated, batches: Sequence[Batch], counted: bool) -> ValidationResult:
    """Summed in float64, so that the batch size does not matter."""
    nats = model.evaluate([MicroBatch(batch.inputs_BS, batch.labels_BS, batch.positions_BS) for batch in batches])
    tokens = sum(int((batch.labels_BS != IGNORED).sum()) for batch in batches) if counted else 0
    text_bytes = sum(batch.target_bytes for batch in batches) if counted else 0
    sums = model.add_over_world(torch.stack((nats, nats.new_tensor(tokens), nats.new_tensor(text_bytes))))
    total, all_tokens, all_bytes = sums.tolist()
    return ValidationResult(total / all_tokens, total / (math.log(2) * all_bytes), int(all_tokens))


def _padded(batch: Batch, size: int) -> Batch:
    """A micro-batch of exactly ``size`` sequences; those added have no labels, and are one document each."""
    missing, length = size - len(batch.labels_BS), batch.labels_BS.shape[1]
    positions_BS = batch.positions_BS
    if positions_BS is not None:
        positions_BS = torch.cat((positions_BS, torch.arange(length).expand(missing, -1)))
    return replace(
        batch,
        inputs_BS=F.pad(batch.inputs_BS, (0, 0, 0, missing)),
        labels_BS=F.pad(batch.labels_BS, (0, 0, 0, missing), value=IGNORED),
        positions_BS=positions_BS,
    )
