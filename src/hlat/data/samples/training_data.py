"""Training and validation samples of prepared data: global sample index -> tokens.

    global sample g --mixture--> source, n-th sample of it --epoch order--> row of that source --> inputs and labels

Without weights all sources are one corpus: g --epoch order--> row. The mapping is a pure function of the data and the
seed and has no state, so any process can read any batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from hlat.config import DataConfig
from hlat.data.documents import Split
from hlat.data.prepared.prepared_folder import PreparedData, check_token_ids
from hlat.data.samples.order import EpochOrder, build_mixture, is_ever_sampled, is_weighted, refuse_too_many_epochs
from hlat.data.samples.packed_rows import (
    PackingWaste,
    RowBatch,
    RowReader,
    TokenRange,
    all_training_documents,
    measure_waste,
    pack_rows,
    part_of,
    source_ranges,
)
from hlat.data.samples.stages import Reading, none_left
from hlat.model import IGNORED
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import DataError
from hlat.runtime.random_keys import stream_key


@sendable
@dataclass(frozen=True)
class Batch:
    """Samples to train on or to evaluate."""

    inputs_BS: torch.Tensor  # token ids, int64, CPU
    labels_BS: torch.Tensor  # the token after each input, int64, CPU; -100 where there is none
    sample_ids: npt.NDArray[np.int64]  # index in the split of each row's sample, int64, shape (B,)
    # Position of each token in its document, int64, CPU; attention does not cross a position 0, which begins a
    # document. None unless documents are isolated.
    positions_BS: torch.Tensor | None = None


class TrainingData:
    """The training split as samples, addressed by a global index that continues over epochs.

    ``reads`` are the readings of a stage, which begins with global sample ``first``; none for a run without stages.
    DataError if the corpus, or a source with a weight, is shorter than one sample, or if a phase is.
    """

    def __init__(
        self,
        prepared: PreparedData,
        config: DataConfig,
        seed: int,
        reads: Sequence[Reading] = (),
        first: int = 0,
    ) -> None:
        length = config.sequence_length
        starts = prepared.document_boundaries("train") if config.isolate else None
        self._reader = RowReader(prepared.tokens("train"), length, starts)
        self._prepared, self._config = prepared, config
        self._ranges = (
            [all_training_documents(prepared)] if _is_single_corpus(config) else source_ranges(prepared, config)
        )
        self.reads, self._first = tuple(reads) or (Reading(),) * len(self._ranges), first
        self._share_out()
        self._rows = [pack_rows(prepared, documents, length, config.packing) for documents in self._ranges]
        counts = [len(rows) for rows in self._rows]
        self._refuse_too_little(counts)
        self.mixture = build_mixture(config)  # None if the sources have no weights
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        if self.mixture is None:
            repeats = [1.0] if len(counts) == 1 else [source.repeat for source in config.sources]
            self._orders = [EpochOrder(counts, repeats, seed, config.shuffle)]
        else:
            seeds = [stream_key(seed, "source", index) for index in range(len(counts))]
            self._orders = [EpochOrder([n], [1.0], s, config.shuffle) for n, s in zip(counts, seeds, strict=True)]
        self.samples_per_epoch = sum(order.epoch_length for order in self._orders)  # each source repeated as configured

    def epochs(self, samples: int) -> dict[str, float]:
        """Return the passes over the corpus (key "") in ``samples``, or over each weighted source."""
        if self.mixture is None:
            return {"": samples / self._orders[0].epoch_length}
        columns = zip(self._config.sources, self.mixture.counts(samples), self._orders, strict=True)
        return {source.label: int(count) / max(order.epoch_length, 1) for source, count, order in columns}

    @property
    def is_part(self) -> bool:
        """True if other stages read some of the text."""
        return any(read != Reading() for read in self.reads)

    def refuse_too_short(self, samples: int) -> None:
        """Raise DataError if ``samples`` samples exceed data.sources.max_epochs of a source."""
        if self.mixture is not None:
            rows = [len(rows) for rows in self._rows]
            counts = self.mixture.counts(samples).tolist()
            needed = [read.first + count for read, count in zip(self.reads, counts, strict=True)]
            refuse_too_many_epochs(self._config, needed, rows)

    @property
    def waste(self) -> PackingWaste | None:
        """Padding and cut documents; None for ``concat``, which does not pad."""
        if self._config.packing == "concat":
            return None
        return measure_waste(self._prepared, self._ranges, int(self._ends[-1]), self._config.sequence_length)

    def sample_ids(self, samples: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the row of each global sample, int64, same shape; numbered over all sources."""
        indexes = np.asarray(samples, dtype=np.int64) - self._first
        if self.mixture is None:
            return self._orders[0].items(self.reads[0].first + indexes)
        sources, ordinals = self.mixture.locate(indexes)
        rows = np.empty_like(indexes)
        for source in np.unique(sources):
            selected = sources == source
            items = self._orders[source].items(self.reads[source].first + ordinals[selected])
            rows[selected] = self._starts[source] + items
        return rows

    def batch(self, first: int, count: int) -> Batch:
        """Return global samples ``first <= g < first + count``, one per row.

        Raises:
            DataError: a shard is damaged: it contains token ids outside the vocabulary.
        """
        ids = self.sample_ids(np.arange(first, first + count))
        numbers = np.searchsorted(self._ends, ids, side="right")
        rows = (ids - self._starts[numbers]).tolist()
        ranges = [self._rows[number].token_ranges(row) for number, row in zip(numbers, rows, strict=True)]
        return make_batch(self._prepared, "train", self._reader.read(ranges), ids)

    def _share_out(self) -> None:
        """Leave earlier and later stages the documents that they read."""
        if len(self.reads) < len(self._ranges):  # one order of sources that are repeated or limited
            if self.reads[0] != Reading(self.reads[0].first):
                raise DataError(
                    f"{self._prepared.dir}: sources with repeat or max_tokens and without weights cannot be shared out "
                    "between stages with other rows (sequence length, packing). Give the sources weights, or say "
                    "restart: true in the later stage."
                )
            return
        for number, (whole, read) in enumerate(zip(self._ranges, self.reads, strict=True)):
            part = part_of(self._prepared, whole, read.earlier, read.own, self._config.packing)
            used = sum(read.earlier) + (read.own or 0)
            if whole.tokens and read != Reading(read.first) and (used >= whole.tokens or part.tokens < (read.own or 1)):
                name = self._config.sources[number].label if len(self._ranges) > 1 else "the text"
                raise DataError(f"{self._prepared.dir}: {name} has {whole.tokens:,} training tokens, {none_left(used)}")
            self._ranges[number] = part

    def _refuse_too_little(self, counts: list[int]) -> None:
        length, packing = self._config.sequence_length, self._config.packing
        minimum = length + 1 if packing == "concat" else 1
        problems = []
        for number, (documents, count) in enumerate(zip(self._ranges, counts, strict=True)):
            if count < 1 and (len(counts) == 1 or is_ever_sampled(self._config, number)):
                of_source = "" if len(counts) == 1 else f" of source {self._config.sources[number].label}"
                problems.append(
                    f"{self._prepared.dir}: {documents.tokens} training tokens{of_source} are too few for one sample, "
                    f"which takes {minimum}. Lower data.sequence_length = {length} or give more text."
                )
        if not problems and not sum(counts):
            problems = [f"{self._prepared.dir}: no source has enough training tokens for one sample ({minimum})."]
        if problems:
            raise DataError("\n".join(problems))


class ValidationData:
    """A split, to validate on, as fixed windows of S labels; the last window is padded with labels -100.

    All windows together predict every token of the split except the first exactly once. ``sequences`` of them are used,
    spread evenly and always the same; None for all. With ``isolate`` the first token of each document has no
    prediction. The split "train" is for a folder that is prepared for validation only. DataError for fewer than two
    tokens.
    """

    def __init__(
        self,
        prepared: PreparedData,
        sequence_length: int,
        sequences: int | None = None,
        isolate: bool = False,
        split: Split = "validation",
    ) -> None:
        tokens = prepared.tokens(split)
        self._prepared, self._length, self._tokens, self._split = prepared, sequence_length, len(tokens), split
        self._reader = RowReader(tokens, sequence_length, prepared.document_boundaries(split) if isolate else None)
        windows = -(-(self._tokens - 1) // sequence_length)
        if windows < 1:
            raise DataError(
                f"{prepared.dir}: {self._tokens} validation tokens leave nothing to predict. Prepare with a "
                "larger data.validation.fraction or with data.validation.path, or turn evaluation off."
            )
        count = windows if sequences is None else min(sequences, windows)
        self._ids = np.arange(count, dtype=np.int64) * windows // count
        record, names = prepared.manifest.splits[split], prepared.manifest.source_names
        self._ends = np.cumsum([each.tokens for each in record.sources])  # the split has its sources one after another
        self.sources = tuple(names.get(each.source, f"source {each.source}") for each in record.sources)

    def __len__(self) -> int:
        return len(self._ids)

    def batch(self, first: int, count: int) -> Batch:
        """Return windows from ``first`` on, fewer at the end; DataError if a shard is damaged."""
        ids = self._ids[first : first + count]
        length, last = self._length, self._tokens - 1
        ranges = [[TokenRange(i * length, min(length, last - i * length), True, False)] for i in ids.tolist()]
        return make_batch(self._prepared, self._split, self._reader.read(ranges), ids)

    def parts(self) -> list[tuple[int, int]]:
        """Return (window, source) for each source of which a window in use has labels, in order."""
        first = self._ids * self._length + 1
        last = np.minimum(first + self._length, self._tokens) - 1
        begin, end = (np.searchsorted(self._ends, tokens, side="right") for tokens in (first, last))
        return [
            (window, source)
            for window, (low, high) in enumerate(zip(begin.tolist(), end.tolist(), strict=True))
            for source in range(low, high + 1)
        ]

    def label_bytes(self, labels: torch.Tensor, source: int | None = None) -> float:
        """Return the UTF-8 bytes of text that labels stand for, the divisor of bits per byte.

        Labels of -100 count nothing. ``source`` is the index in ``sources`` of the one that all labels are of; None for
        any.
        """
        # Ids spell other bytes than the text if the tokenizer changes it: scaled by the ratio of the source of all
        # labels.
        spelled = int(self._prepared.token_bytes[labels[labels != IGNORED].numpy()].sum())
        text, count = self._total if source is None else self._text_and_spelling[source]
        return spelled * text / count

    @cached_property
    def _text_and_spelling(self) -> list[tuple[float, float]]:
        return self._prepared.text_and_spelling(self._split)

    @cached_property
    def _total(self) -> tuple[float, float]:
        text, spelled = zip(*self._text_and_spelling, strict=True)
        return sum(text), sum(spelled)

    def part_batch(self, parts: Sequence[tuple[int, int]]) -> Batch:
        """Return a row per (window, source), with that source's labels only; errors as ``batch``."""
        rows = [self.batch(window, 1) for window, _ in parts] or [self.batch(len(self), 1)]
        labels_BS = torch.cat([row.labels_BS for row in rows])
        for index, (window, source) in enumerate(parts):
            tokens = self._ids[window] * self._length + 1 + np.arange(self._length)
            other = np.searchsorted(self._ends, tokens, side="right") != source
            labels_BS[index, torch.from_numpy(other)] = IGNORED
        positions = [row.positions_BS for row in rows if row.positions_BS is not None]
        return Batch(
            torch.cat([row.inputs_BS for row in rows]),
            labels_BS,
            np.concatenate([row.sample_ids for row in rows]),
            torch.cat(positions) if positions else None,
        )


def make_batch(prepared: PreparedData, split: Split, rows: RowBatch, ids: npt.NDArray[np.int64]) -> Batch:
    """Convert rows to tensors; DataError if they contain token ids outside the vocabulary."""
    highest_id, position = rows.highest_token
    check_token_ids(prepared, split, highest_id, position)
    positions_BS = None if rows.positions_BS is None else torch.from_numpy(rows.positions_BS)
    inputs_BS, labels_BS = torch.from_numpy(rows.inputs_BS), torch.from_numpy(rows.labels_BS)
    return Batch(inputs_BS, labels_BS, ids.copy(), positions_BS)


def _is_single_corpus(config: DataConfig) -> bool:
    """Return True if samples may cross from one source into the next."""
    # A source with a repeat, a limit or a weight is addressed by itself.
    plain = all(source.repeat == 1 and source.max_tokens is None for source in config.sources)
    return plain and not is_weighted(config)
