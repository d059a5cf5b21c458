"""Global sample index -> tokens, a pure function of the data and the seed.

    global sample g --> epoch g // n, position g % n --permute--> sample i --> tokens [i S, i S + S], both ends included

S inputs and S labels, shifted by one. Consecutive samples share one token, as label of one and first input of the
next, so that in an epoch every token but the first of the corpus is predicted exactly once (a remainder of less than
S tokens at the end is left out of training). Nothing here has a state: any process may ask for any batch.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hlat.data.order import permute
from hlat.data.prepared import Prepared
from hlat.data.shards import TokenArray
from hlat.model import IGNORED
from hlat.runtime import DataError


@dataclass(frozen=True)
class Batch:
    """Samples to train on or to evaluate.

    Attributes:
        inputs_BS: token ids, int64, CPU.
        labels_BS: the token after each input, int64, CPU; -100 where there is none.
        sample_ids: which sample of the split each row is, int64, shape (B,).
        target_bytes: UTF-8 bytes of text that the labels stand for, the divisor of bits per byte.
        positions_BS: place of each token in its document, int64, CPU; every 0 begins a document that sees only
            itself. None where documents are not isolated.
    """

    inputs_BS: torch.Tensor
    labels_BS: torch.Tensor
    sample_ids: npt.NDArray[np.int64]
    target_bytes: int
    positions_BS: torch.Tensor | None = None


class TrainingData:
    """The training split as samples, addressed by a global index that runs on over the epochs.

    Args:
        prepared: the data.
        sequence_length: tokens per sample, S.
        seed: of the order.
        shuffle: visit the samples in a permutation, another one each epoch; else in the order of the corpus.

    Raises:
        DataError: less text than one sample.
    """

    def __init__(self, prepared: Prepared, sequence_length: int, seed: int, shuffle: bool = True) -> None:
        self._tokens = prepared.tokens("train")
        self._token_bytes = prepared.token_bytes
        self._length, self._seed, self._shuffle = sequence_length, seed, shuffle
        self.samples_per_epoch = (len(self._tokens) - 1) // sequence_length
        if self.samples_per_epoch < 1:
            raise DataError(
                f"{prepared.dir}: {len(self._tokens)} training tokens are too few for one sample, which takes "
                f"{sequence_length + 1}. Lower data.sequence_length = {sequence_length} or give more text."
            )

    def sample_ids(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Which sample of the corpus each global sample ``first <= g < first + count`` is, int64."""
        n = self.samples_per_epoch
        positions = np.arange(first, first + count, dtype=np.int64)
        if not self._shuffle:
            return positions % n
        ids = np.empty_like(positions)
        for epoch in np.unique(positions // n):
            here = positions // n == epoch
            ids[here] = permute(self._seed, int(epoch), positions[here] % n, n)
        return ids

    def batch(self, first: int, count: int) -> Batch:
        """Global samples ``first <= g < first + count``, one per row.

        Raises:
            DataError: a shard is damaged: it holds ids that the vocabulary does not.
        """
        ids = self.sample_ids(first, count)
        return _batch(self._tokens, self._token_bytes, ids, self._length)


class ValidationData:
    """The validation split as fixed windows of S labels; the last one is padded with labels -100.

    All windows together predict every token of the split but its first exactly once.

    Args:
        prepared: the data.
        sequence_length: tokens per window, S.
        sequences: how many windows to use, evenly spread over the split and always the same; None for all.

    Raises:
        DataError: no validation text.
    """

    def __init__(self, prepared: Prepared, sequence_length: int, sequences: int | None = None) -> None:
        self._tokens = prepared.tokens("validation")
        self._token_bytes = prepared.token_bytes
        self._length = sequence_length
        windows = -(-(len(self._tokens) - 1) // sequence_length)
        if windows < 1:
            raise DataError(
                f"{prepared.dir}: {len(self._tokens)} validation tokens leave nothing to predict. Prepare with a "
                "larger data.validation.fraction or with data.validation.path, or turn evaluation off."
            )
        count = windows if sequences is None else min(sequences, windows)
        self._ids = np.arange(count, dtype=np.int64) * windows // count

    def __len__(self) -> int:
        """Windows in use."""
        return len(self._ids)

    def batch(self, first: int, count: int) -> Batch:
        """Windows ``first <= w < first + count`` of those in use; fewer at the end.

        Raises:
            DataError: a shard is damaged: it holds ids that the vocabulary does not.
        """
        return _batch(self._tokens, self._token_bytes, self._ids[first : first + count], self._length)


def _batch(tokens: TokenArray, token_bytes: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], length: int) -> Batch:
    rows = np.zeros((len(ids), length + 1), dtype=np.int64)
    sizes = np.empty(len(ids), dtype=np.int64)
    for row, sample in enumerate(ids.tolist()):
        read = tokens.read(sample * length, min((sample + 1) * length + 1, len(tokens)))
        rows[row, : len(read)] = read
        sizes[row] = len(read)
    if rows.max(initial=0) >= len(token_bytes):
        bad_row, column = divmod(int(rows.argmax()), length + 1)
        file = tokens.file_of(int(ids[bad_row]) * length + column)
        raise DataError(
            f"{file}: damaged: it holds token {rows.max()}, the vocabulary has {len(token_bytes)}. `hlat data prepare` "
            "names all damaged files: restore them, or delete their folder and prepare again."
        )
    labels = rows[:, 1:].copy()
    given = np.arange(1, length + 1) < sizes[:, None]
    target_bytes = int(token_bytes[labels[given]].sum())
    labels[~given] = IGNORED
    inputs = np.where(np.arange(length) < sizes[:, None], rows[:, :-1], 0)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), ids.copy(), target_bytes)
