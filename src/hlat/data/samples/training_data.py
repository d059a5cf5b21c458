"""Global sample index -> tokens, a pure function of the data and the seed.

    global sample g --mixture--> source, its n-th sample --turns--> row of that source --rows--> inputs and labels

Without weights all sources are one corpus: g --turns--> row. Nothing here has a state: any process may ask for any
batch.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hlat.config.sections import DataConfig
from hlat.data.prepared import PreparedData, check_token_ids
from hlat.data.samples.epoch_order import EpochOrder
from hlat.data.samples.packed_rows import BestFitRows, RowBatch, RowReader, TokenRange
from hlat.data.samples.packing import PackingWaste, all_training_documents, measure_waste, pack_rows, source_ranges
from hlat.data.samples.weights import build_mixture, is_ever_sampled, is_weighted, refuse_too_many_epochs
from hlat.data.sources import Split
from hlat.model import IGNORED
from hlat.runtime import DataError
from hlat.runtime.distributed import sendable
from hlat.runtime.randomness import stream_key


@sendable
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
        config: the data section: sequence length, packing, isolation, order, sources and their weights.
        seed: of the order.

    Attributes:
        mixture: which source each sample is from; None where they have no weights.
        samples_per_epoch: of one pass over the corpus, every source as often as it counts.

    Raises:
        DataError: less text than one sample, in all or in a source that has a weight; or a phase too short for one.
    """

    def __init__(self, prepared: PreparedData, config: DataConfig, seed: int) -> None:
        length = config.sequence_length
        starts = prepared.document_boundaries("train") if config.isolate else None
        self._reader = RowReader(prepared.tokens("train"), length, starts)
        self._prepared, self._config = prepared, config
        self._ranges = (
            [all_training_documents(prepared)] if _is_single_corpus(config) else source_ranges(prepared, config)
        )
        self._rows = [pack_rows(prepared, span, length, config.packing) for span in self._ranges]
        counts = [len(rows) for rows in self._rows]
        self._refuse_too_little(counts)
        self.mixture = build_mixture(config)
        self._ends = np.cumsum(counts)
        if self.mixture is None:
            counted = [1.0] if len(counts) == 1 else [source.repeat for source in config.sources]
            self._turns = [EpochOrder(counts, counted, seed, config.shuffle)]
        else:
            seeds = [stream_key(seed, "source", index) for index in range(len(counts))]
            self._turns = [EpochOrder([n], [1.0], s, config.shuffle) for n, s in zip(counts, seeds, strict=True)]
        self.samples_per_epoch = sum(turns.epoch_length for turns in self._turns)

    def epochs(self, samples: int) -> dict[str, float]:
        """Passes over the corpus, or over each source by name where they have weights, in so many samples."""
        if self.mixture is None:
            return {"": samples / self._turns[0].epoch_length}
        found = zip(self._config.sources, self.mixture.counts(samples), self._turns, strict=True)
        return {source.label: int(count) / max(turns.epoch_length, 1) for source, count, turns in found}

    def refuse_too_short(self, samples: int) -> None:
        """Raise DataError if a run of so many samples needs more of a source than the recipe lets it have."""
        if self.mixture is not None:
            rows = [len(rows) for rows in self._rows]
            refuse_too_many_epochs(self._config, self.mixture.counts(samples).tolist(), rows)

    @property
    def waste(self) -> list[PackingWaste]:
        """What packing costs in each stretch, where it pads."""
        both = zip(self._rows, self._ranges, strict=True)
        length = self._config.sequence_length
        return [
            measure_waste(self._prepared, rows, part, length) for rows, part in both if isinstance(rows, BestFitRows)
        ]

    def sample_ids(self, samples: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Which row of the corpus each global sample is, int64; rows are counted over all sources."""
        asked = np.asarray(samples, dtype=np.int64)
        if self.mixture is None:
            return self._turns[0].items(asked)
        sources, ordinals = self.mixture.locate(asked)
        found = np.empty_like(asked)
        for source in np.unique(sources):
            here = sources == source
            first = int(self._ends[source - 1]) if source else 0
            found[here] = first + self._turns[source].items(ordinals[here])
        return found

    def batch(self, first: int, count: int) -> Batch:
        """Global samples ``first <= g < first + count``, one per row.

        Raises:
            DataError: a shard is damaged: it holds ids that the vocabulary does not.
        """
        ids = self.sample_ids(np.arange(first, first + count))
        lists = np.searchsorted(self._ends, ids, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        pieces = [
            self._rows[number].pieces(row) for number, row in zip(lists, (ids - starts[lists]).tolist(), strict=True)
        ]
        return make_batch(self._prepared, "train", self._reader.read(pieces), ids)

    def _refuse_too_little(self, counts: list[int]) -> None:
        length, packing = self._config.sequence_length, self._config.packing
        least = length + 1 if packing == "concat" else 1
        problems = []
        for number, (span, count) in enumerate(zip(self._ranges, counts, strict=True)):
            if count < 1 and (len(counts) == 1 or is_ever_sampled(self._config, number)):
                what = "" if len(counts) == 1 else f" of source {self._config.sources[number].label}"
                problems.append(
                    f"{self._prepared.dir}: {span.tokens} training tokens{what} are too few for one sample, which "
                    f"takes {least}. Lower data.sequence_length = {length} or give more text."
                )
        if not problems and not sum(counts):
            problems = [f"{self._prepared.dir}: no source has enough training tokens for one sample ({least})."]
        if problems:
            raise DataError("\n".join(problems))


class ValidationData:
    """The validation split as fixed windows of S labels; the last one is padded with labels -100.

    All windows together predict every token of the split but its first exactly once.

    Args:
        prepared: the data.
        sequence_length: tokens per window, S.
        sequences: how many windows to use, evenly spread over the split and always the same; None for all.
        isolate: whether a document sees only itself; its first token is then predicted by none.

    Raises:
        DataError: no validation text.
    """

    def __init__(
        self, prepared: PreparedData, sequence_length: int, sequences: int | None = None, isolate: bool = False
    ) -> None:
        tokens = prepared.tokens("validation")
        self._prepared, self._length, self._tokens = prepared, sequence_length, len(tokens)
        self._reader = RowReader(
            tokens, sequence_length, prepared.document_boundaries("validation") if isolate else None
        )
        windows = -(-(self._tokens - 1) // sequence_length)
        if windows < 1:
            raise DataError(
                f"{prepared.dir}: {self._tokens} validation tokens leave nothing to predict. Prepare with a "
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
        ids = self._ids[first : first + count]
        length, last = self._length, self._tokens - 1
        pieces = [[TokenRange(i * length, min(length, last - i * length), True, False)] for i in ids.tolist()]
        return make_batch(self._prepared, "validation", self._reader.read(pieces), ids)


def make_batch(prepared: PreparedData, split: Split, read: RowBatch, ids: npt.NDArray[np.int64]) -> Batch:
    """Rows that have been read, as tensors.

    Raises:
        DataError: they hold ids that the vocabulary does not.
    """
    token_bytes = prepared.token_bytes
    highest, place = read.highest_token
    check_token_ids(prepared, split, highest, place)
    target_bytes = int(token_bytes[read.labels_BS[read.labels_BS != IGNORED]].sum())
    positions_BS = None if read.positions_BS is None else torch.from_numpy(read.positions_BS)
    inputs_BS, labels_BS = torch.from_numpy(read.inputs_BS), torch.from_numpy(read.labels_BS)
    return Batch(inputs_BS, labels_BS, ids.copy(), target_bytes, positions_BS)


def _is_single_corpus(config: DataConfig) -> bool:
    """Whether samples may cross from one source into the next: where nothing is said of any of them."""
    plain = all(source.repeat == 1 and source.max_tokens is None for source in config.sources)
    return plain and not is_weighted(config)
