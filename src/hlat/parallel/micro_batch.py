"""A batch of sequences for a model.

complete sequences on the CPU -> the positions of this rank, on its device -> micro-batches
"""

from typing import NamedTuple

import torch


class MicroBatch(NamedTuple):
    """Sequences, complete or restricted to the positions of a rank.

    Attributes:
        inputs_BS: token ids, int64.
        labels_BS: the next token of each, int64; ``hlat.model.IGNORED`` for none.
        positions_BS: position of each token within its document, int64; every 0 starts a document. None if attention
            is not restricted to documents.
    """

    inputs_BS: torch.Tensor
    labels_BS: torch.Tensor
    positions_BS: torch.Tensor | None = None

    def local(self, spans: tuple[tuple[int, int], ...], device: torch.device) -> "MicroBatch":
        """Select the positions of (start, stop) pairs from complete sequences, and copy them to a device."""

        def select(rows_BS: torch.Tensor) -> torch.Tensor:
            selected = rows_BS if len(spans) == 1 else torch.cat([rows_BS[:, a:b] for a, b in spans], dim=1)
            return selected.to(device, non_blocking=True)

        positions = None if self.positions_BS is None else select(self.positions_BS)
        return MicroBatch(select(self.inputs_BS), select(self.labels_BS), positions)

    def split(self, size: int) -> list["MicroBatch"]:
        """Split into micro-batches of ``size`` sequences."""
        inputs, labels = self.inputs_BS.split(size), self.labels_BS.split(size)
        positions = [None] * len(inputs) if self.positions_BS is None else self.positions_BS.split(size)
        return [MicroBatch(*fields) for fields in zip(inputs, labels, positions, strict=True)]
