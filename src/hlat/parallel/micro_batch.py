"""Some sequences on their way through a model.

whole sequences on the CPU -> the positions of them that a rank has, on its device -> micro-batches
"""

from typing import NamedTuple

import torch


class MicroBatch(NamedTuple):
    """Sequences, whole or the positions of them that a rank has.

    Attributes:
        inputs_BS: token ids, int64.
        labels_BS: the token after each, int64; ``hlat.model.IGNORED`` where there is none.
        positions_BS: place of each token in its document, int64, every 0 begins one that sees only itself; None where
            documents are not isolated.
    """

    inputs_BS: torch.Tensor
    labels_BS: torch.Tensor
    positions_BS: torch.Tensor | None = None

    def local(self, spans: tuple[tuple[int, int], ...], device: torch.device) -> "MicroBatch":
        """The places of whole sequences within some (start, stop) pairs, on a device."""

        def here(rows_BS: torch.Tensor) -> torch.Tensor:
            part = rows_BS if len(spans) == 1 else torch.cat([rows_BS[:, a:b] for a, b in spans], dim=1)
            return part.to(device, non_blocking=True)

        places = None if self.positions_BS is None else here(self.positions_BS)
        return MicroBatch(here(self.inputs_BS), here(self.labels_BS), places)

    def split(self, size: int) -> list["MicroBatch"]:
        """In pieces of ``size`` sequences."""
        inputs, labels = self.inputs_BS.split(size), self.labels_BS.split(size)
        places = [None] * len(inputs) if self.positions_BS is None else self.positions_BS.split(size)
        return [MicroBatch(*parts) for parts in zip(inputs, labels, places, strict=True)]
