"""Summary of prepared data for ``hlat data show``: counts, document lengths, samples of text."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hlat.data.documents import SPLITS, Split
from hlat.data.prepared.manifest import SourceRows
from hlat.data.prepared.prepared_folder import PreparedData, check_token_ids
from hlat.runtime.terminal import plural

_CHUNK = 1 << 20  # documents processed at once
_MAX_EXACT = 1 << 20  # tokens; longer documents are counted as one length


@dataclass(frozen=True)
class LengthBucket:
    """Number of documents of ``at_least`` to ``at_most`` tokens, and their total tokens."""

    at_least: int
    at_most: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class LengthStatistics:
    """Statistics of the document lengths of a split, in tokens, end-of-sequence tokens included."""

    shortest: int  # length of the shortest document
    longest: int  # length of the longest document
    mean: float
    median: int  # 0.5 quantile of the lengths; 2**20 also stands for longer ones
    p90: int  # 0.9 quantile, likewise
    p99: int  # 0.99 quantile, likewise
    buckets: list[LengthBucket]  # histogram by powers of two, from the shortest to the longest document


@dataclass(frozen=True)
class SourceCounts:
    """Documents and tokens of one source in a split."""

    name: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class SplitSummary:
    """Counts of a split; ``lengths`` is None for an empty split."""

    documents: int
    tokens: int
    text_bytes: int
    shards: int
    sources: list[SourceCounts]
    lengths: LengthStatistics | None


@dataclass(frozen=True)
class Passage:
    """A contiguous range of tokens of one document, decoded."""

    document: int  # index of the document in the split
    document_tokens: int
    tokens: int
    begins: bool  # True if the passage begins at the beginning of the document
    ends: bool  # True if the passage ends at the end of the document
    text: str  # decoded text


@dataclass(frozen=True)
class TextSample:
    """Contiguous tokens of a split from a position on, as passages of their documents."""

    split: Split
    position: int
    passages: list[Passage]


@dataclass(frozen=True)
class Summary:
    """Summary of prepared data; a source without a name is listed by its path."""

    folder: str
    fingerprint: str
    vocab_size: int
    dtype: str
    eos_token: str | None
    splits: dict[Split, SplitSummary]
    rows: list[SourceRows]
    copies_dropped: bool
    quarantine: str | None
    notes: list[str]
    samples: list[TextSample]


def summarize(prepared: PreparedData, samples: int = 3, tokens: int = 128) -> Summary:
    """Summarize prepared data, with ``samples`` texts per split of ``tokens`` tokens, evenly spread over it.

    DataError if the document boundaries are damaged, or an id is not in the vocabulary.
    """
    manifest = prepared.manifest
    quarantine = manifest.quarantine
    notes = prepared.notes
    if manifest.blocks is not None:
        notes.append(
            f"The training text is tokenized while training, from {plural(sum(manifest.blocks.counts), 'block')}."
        )
    return Summary(
        folder=str(prepared.dir),
        fingerprint=manifest.fingerprint,
        vocab_size=manifest.vocab_size,
        dtype=manifest.dtype,
        eos_token=prepared.tokenizer.eos_token,
        splits={split: _split(prepared, split) for split in SPLITS},
        rows=[row.model_copy(update={"name": manifest.source_names[row.source]}) for row in manifest.rows],
        copies_dropped=manifest.copies_dropped,
        quarantine=None if quarantine is None else str(prepared.dir / quarantine.file),
        notes=notes,
        samples=[sample for split in SPLITS for sample in _samples(prepared, split, samples, tokens)],
    )


def _split(prepared: PreparedData, split: Split) -> SplitSummary:
    record = prepared.manifest.splits[split]
    names = prepared.manifest.source_names
    return SplitSummary(
        documents=record.documents,
        tokens=record.tokens,
        text_bytes=record.text_bytes,
        shards=len(record.shards),
        sources=[
            SourceCounts(names.get(item.source, "all sources"), item.documents, item.tokens) for item in record.sources
        ],
        lengths=_lengths(prepared.document_boundaries(split)) if record.documents else None,
    )


def _lengths(starts: npt.NDArray[np.uint64]) -> LengthStatistics:
    """Compute statistics from the document boundaries, shape (documents + 1,), in bounded memory."""
    exact = np.zeros(_MAX_EXACT + 1, dtype=np.int64)
    documents, tokens = np.zeros((2, 65), dtype=np.int64)  # by the exponent k of the smallest 2**k above a length
    shortest, longest = int(starts[-1]), 0
    for begin in range(0, len(starts) - 1, _CHUNK):
        lengths = np.diff(starts[begin : begin + _CHUNK + 1].astype(np.int64))
        exact += np.bincount(np.minimum(lengths, _MAX_EXACT), minlength=_MAX_EXACT + 1)
        # exact: lengths are far below 2**53
        powers = np.frexp(lengths.astype(np.float64))[1]
        documents += np.bincount(powers, minlength=65)
        np.add.at(tokens, powers, lengths)
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    total = len(starts) - 1
    cumulative = np.cumsum(exact)
    median, p90, p99 = (int(np.searchsorted(cumulative, share * total)) for share in (0.5, 0.9, 0.99))
    buckets = [
        LengthBucket((1 << power) >> 1, max((1 << power) - 1, 0), int(documents[power]), int(tokens[power]))
        for power in range(shortest.bit_length(), longest.bit_length() + 1)
    ]
    return LengthStatistics(shortest, longest, int(starts[-1]) / total, median, p90, p99, buckets)


def _samples(prepared: PreparedData, split: Split, count: int, tokens: int) -> Iterator[TextSample]:
    """Yield samples around the beginnings of evenly spread documents."""
    starts = prepared.document_boundaries(split)
    documents, total = len(starts) - 1, int(starts[-1])
    chosen = {documents * (2 * number + 1) // (2 * count) for number in range(count)} if total else set()
    for document in sorted(chosen):
        # A quarter of it lies before the beginning of the document.
        position = max(min(int(starts[document]) - tokens // 4, total - tokens), 0)
        yield TextSample(split, position, list(_passages(prepared, split, position, min(position + tokens, total))))


def _passages(prepared: PreparedData, split: Split, start: int, stop: int) -> Iterator[Passage]:
    """Yield the passages of the token range from ``start`` to ``stop`` of a split, one per document."""
    starts, tokens = prepared.document_boundaries(split), prepared.tokens(split)
    first = int(np.searchsorted(starts, start, side="right")) - 1
    after = int(np.searchsorted(starts, stop, side="left"))
    for document, (begin, end) in enumerate(pairwise(starts[first : after + 1].tolist()), first):
        ids = tokens.read(max(begin, start), min(end, stop)).tolist()
        check_token_ids(prepared, split, max(ids, default=0), max(begin, start))
        text = prepared.tokenizer.decode(ids)
        yield Passage(document, end - begin, len(ids), begin >= start, end <= stop, text)
