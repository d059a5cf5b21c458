"""Rows of tokens of different lengths, batched for every data-parallel rank.

    rows --row_lengths--> groups of one padded length --split_batches--> this rank's batches --pad_rows--> MicroBatch

Rows are padded to one of a few lengths, so that short rows cost less than complete sequences. Padding comes last,
where causal attention does not look at it.
"""

from collections.abc import Sequence

import torch

from hlat.model import IGNORED
from hlat.parallel import MicroBatch
from hlat.training.validation.requests import TokenRow

_SHORTEST_ROW = 128  # tokens: shorter rows are not faster


def row_lengths(longest: int, multiple: int) -> list[int]:
    """Return the lengths that rows are padded to, ascending: halves of the longest that are multiples of a number."""
    lengths = [longest]
    while lengths[-1] // 2 >= _SHORTEST_ROW and lengths[-1] % (2 * multiple) == 0:
        lengths.append(lengths[-1] // 2)
    return lengths[::-1]


def pad_rows(rows: Sequence[TokenRow], size: int, length: int, isolate: bool) -> MicroBatch:
    """Pad rows to a batch of ``size`` rows of ``length`` tokens; only tokens of continuations are labels."""
    inputs_BS = torch.zeros(size, length, dtype=torch.int64)
    labels_BS = torch.full((size, length), IGNORED, dtype=torch.int64)
    for index, row in enumerate(rows):
        tokens, last = torch.tensor(row.tokens), len(row.tokens) - 1
        inputs_BS[index, :last] = tokens[:-1]
        labels_BS[index, last - row.asked : last] = tokens[-row.asked :]
    positions_BS = torch.arange(length).expand(size, -1).contiguous() if isolate else None
    return MicroBatch(inputs_BS, labels_BS, positions_BS)
