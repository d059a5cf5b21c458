"""Loss on a fixed set of sequences, and bits per byte, which is comparable across tokenizers. Forward only.

    ValidationData --validate: equal batches for every data-parallel rank--> LossEvaluator --> losses of rows
        --summed over ranks, and by source--> ValidationResult

A LossEvaluator is the model of a run, in any parallel layout, or a ``SingleProcessModel``.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from hlat.data import Batch, ValidationData
from hlat.model import IGNORED, Decoder, Reduction, row_losses
from hlat.parallel import MicroBatch, sum_on_host


def split_batches(members: Sequence[int], size: int, ranks: int, rank: int) -> list[list[int]]:
    """Split rows into batches, and return those of a data-parallel rank; every rank has the same number of them."""
    # The same number on every rank, if need be of empty batches: every rank takes part in every collective operation.
    rounds = -(-len(members) // (size * ranks))
    starts = [(number * ranks + rank) * size for number in range(rounds)]
    return [list(members[start : start + size]) for start in starts]


@dataclass(frozen=True)
class ValidationResult:
    """Averages over the validation set."""

    loss: float  # nats per token
    bits_per_byte: float  # total nats / (ln 2 * UTF-8 bytes of the predicted tokens' text)
    tokens: int
    sources: Mapping[str, "ValidationResult"] = field(default_factory=dict)  # of each source, if there are several


class LossEvaluator(Protocol):
    """Model that can be validated: complete in one process, or this rank's shard."""

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks, which evaluate different rows."""

    @property
    def data_index(self) -> int:
        """This rank's index among them."""

    @property
    def is_model_parallel_leader(self) -> bool:
        """True for one of the ranks that evaluate the same rows."""

    @property
    def row_multiple(self) -> int:
        """Number of which the length of evaluated rows is a multiple, in tokens."""

    @property
    def isolates(self) -> bool:
        """True if rows come with the positions of their tokens within documents."""

    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Return this rank's term of the summed loss: a float64 scalar on the CPU, in nats.

        Args:
            batches: complete sequences, on the CPU.
        """

    def evaluate_rows(self, batches: Sequence[MicroBatch], reduction: Reduction = row_losses) -> torch.Tensor:
        """Return this rank's terms of a number for each row, its summed loss in nats: (rows of all batches,).

        Args:
            batches: rows on the CPU, all batches of one shape; the same number of batches on every rank.
            reduction: computes the number.
        """

    def sum_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a CPU tensor over all ranks."""


class SingleProcessModel:
    """A complete model in this process, as a ``LossEvaluator``."""

    data_ranks, data_index, row_multiple = 1, 0, 1
    is_model_parallel_leader, isolates = True, False

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._device = next(model.parameters()).device

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        losses = []
        for batch in batches:
            inputs_BS, labels_BS, positions_BS = batch.local(((0, batch.inputs_BS.shape[1]),), self._device)
            losses.append(self._model(inputs_BS, labels_BS, positions=positions_BS))
        return sum_on_host(losses)

    @torch.no_grad()
    def evaluate_rows(self, batches: Sequence[MicroBatch], reduction: Reduction = row_losses) -> torch.Tensor:
        nats = [torch.zeros(0, dtype=torch.float64)]
        for batch in batches:
            inputs_BS, labels_BS, _ = batch.local(((0, batch.inputs_BS.shape[1]),), self._device)
            nats.append(self._model(inputs_BS, labels_BS, reduction=reduction).cpu().double())
        return torch.cat(nats)

    def sum_over_world(self, values: torch.Tensor) -> torch.Tensor:
        return values


_MOST_SOURCES = 32
"""Sources above which only the total is computed: each costs up to a row, and a curve."""

Progress = Callable[[int, int], None]
"""Called with the micro-batches of this rank that are done, and their number."""


class _Reported(Sequence[MicroBatch]):
    """Micro-batches that report which of them are taken."""

    def __init__(self, batches: Sequence[MicroBatch], progress: Progress | None) -> None:
        self._batches, self._progress = batches, progress

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[index]

    def __iter__(self) -> Iterator[MicroBatch]:
        for done, batch in enumerate(self._batches):
            if self._progress is not None:
                self._progress(done, len(self._batches))
            yield batch
        if self._progress is not None:
            self._progress(len(self._batches), len(self._batches))


def validate(
    model: LossEvaluator, data: ValidationData, batch_size: int, progress: Progress | None = None
) -> ValidationResult:
    """Return the mean next-token loss over a validation set, the same on every rank. Collective.

    A set of several sources has the loss of each, too: a window with text of two sources is then a row for each.
    ``batch_size`` is the number of sequences in a micro-batch; it does not change the result.
    """
    if 1 < len(data.sources) <= _MOST_SOURCES:
        return _by_source(model, data, batch_size, progress)
    ranks, index = model.data_ranks, model.data_index
    # Micro-batches go to data-parallel ranks round-robin. The last ones are padded with sequences without labels,
    # because every rank has to take part in every collective operation.
    rounds = -(-len(data) // (batch_size * ranks))
    batches = [data.batch((number * ranks + index) * batch_size, batch_size) for number in range(rounds)]
    padded = [_padded(batch, batch_size) for batch in batches]
    nats = model.evaluate(_Reported([_micro_batch(batch) for batch in padded], progress))
    # The ranks of one model replica have the same rows: one of them counts.
    counted = padded if model.is_model_parallel_leader else []
    tokens = sum(int((batch.labels_BS != IGNORED).sum()) for batch in counted)
    text_bytes = sum(data.label_bytes(batch.labels_BS) for batch in counted)
    sums = model.sum_over_world(torch.stack((nats, nats.new_tensor(tokens), nats.new_tensor(text_bytes))))
    return _result(*sums.tolist())


def _by_source(
    model: LossEvaluator, data: ValidationData, batch_size: int, progress: Progress | None
) -> ValidationResult:
    parts = data.parts()
    mine = split_batches(range(len(parts)), batch_size, model.data_ranks, model.data_index)
    members = [[parts[index] for index in batch] for batch in mine]
    batches = [_padded(data.part_batch(rows), batch_size) for rows in members]
    row_nats = model.evaluate_rows(_Reported([_micro_batch(batch) for batch in batches], progress))
    # float64 sums, so that the batch size does not matter. The total is the mean of the sources weighted by their
    # tokens.
    sums = row_nats.new_zeros(3, len(data.sources))  # nats, tokens, bytes
    for number, rows in enumerate(members):
        for place, (_, source) in enumerate(rows):
            sums[0, source] += row_nats[number * batch_size + place]
            if model.is_model_parallel_leader:
                labels_S = batches[number].labels_BS[place]
                sums[1, source] += int((labels_S != IGNORED).sum())
                sums[2, source] += data.label_bytes(labels_S, source)
    sums = model.sum_over_world(sums)
    found = {name: _result(*column) for name, column in zip(data.sources, sums.T.tolist(), strict=True) if column[1]}
    return replace(_result(*sums.sum(1).tolist()), sources=found)


def _result(nats: float, tokens: float, text_bytes: float) -> ValidationResult:
    bits = nats / (math.log(2) * text_bytes) if text_bytes else math.nan
    return ValidationResult(nats / tokens, bits, int(tokens))


def _micro_batch(batch: Batch) -> MicroBatch:
    return MicroBatch(batch.inputs_BS, batch.labels_BS, batch.positions_BS)


def _padded(batch: Batch, size: int) -> Batch:
    """Pad a micro-batch to ``size`` sequences; the added ones have no labels and are one document each."""
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
