"""What prepared data holds, told to a person or a program: counts, lengths of documents, samples of text."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hlat.data.manifest import SourceRows
from hlat.data.prepared.prepared_folder import PreparedData, check_token_ids
from hlat.data.sources import SPLITS, Split

_CHUNK = 1 << 20  # documents looked at together
_EXACT = 1 << 20  # tokens up to which lengths are counted one by one


@dataclass(frozen=True)
class LengthBucket:
    """Documents of ``at_least`` to ``at_most`` tokens, and the tokens of all of them."""

    at_least: int
    at_most: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class LengthStatistics:
    """How long the documents of a split are, in tokens, end tokens included.

    Attributes:
        shortest, longest, mean: over all documents.
        median, p90, p99: so many tokens or fewer have a half, 90 % and 99 % of them; 2**20 stands for more than that.
        buckets: by powers of two, from the shortest to the longest document.
    """

    shortest: int
    longest: int
    mean: float
    median: int
    p90: int
    p99: int
    buckets: list[LengthBucket]


@dataclass(frozen=True)
class SourceCounts:
    """What a split holds of one source."""

    name: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class SplitSummary:
    """What a split holds; ``lengths`` is None where that is nothing."""

    documents: int
    tokens: int
    text_bytes: int
    shards: int
    sources: list[SourceCounts]
    lengths: LengthStatistics | None


@dataclass(frozen=True)
class Passage:
    """A stretch of one document: its text, and whether the document begins and ends with it.

    Attributes:
        document: index in the split.
        document_tokens: of the whole document.
        tokens: of the stretch.
        begins, ends: whether its first and last tokens are the document's.
        text: decoded.
    """

    document: int
    document_tokens: int
    tokens: int
    begins: bool
    ends: bool
    text: str


@dataclass(frozen=True)
class TextSample:
    """Tokens that follow one another in a split, from a position on, by the documents they belong to."""

    split: Split
    position: int
    passages: list[Passage]


@dataclass(frozen=True)
class Summary:
    """What prepared data holds; sources without a name are called by their path."""

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
    """Tell what prepared data holds.

    Args:
        prepared: the data.
        samples: how many samples of text to decode of each split, evenly spread over it.
        tokens: of each sample.

    Raises:
        DataError: damaged: boundaries of documents that are none, or ids that the vocabulary does not have.
    """
    manifest = prepared.manifest
    quarantine = manifest.quarantine
    notes = [*prepared.notes, *prepared.advice]
    if manifest.blocks is not None:
        notes.append(f"Training tokenizes its text itself, {sum(manifest.blocks.counts):,} blocks of it.")
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
            SourceCounts(names.get(part.source, "all sources"), part.documents, part.tokens) for part in record.sources
        ],
        lengths=_lengths(prepared.document_boundaries(split)) if record.documents else None,
    )


def _lengths(starts: npt.NDArray[np.uint64]) -> LengthStatistics:
    """Lengths of documents from where they begin and end, shape (documents + 1,), in bounded memory."""
    exact = np.zeros(_EXACT + 1, dtype=np.int64)
    documents, tokens = np.zeros(65, dtype=np.int64), np.zeros(65, dtype=np.int64)  # of lengths below 2**k
    shortest, longest = int(starts[-1]), 0
    for begin in range(0, len(starts) - 1, _CHUNK):
        lengths = np.diff(starts[begin : begin + _CHUNK + 1].astype(np.int64))
        exact += np.bincount(np.minimum(lengths, _EXACT), minlength=_EXACT + 1)
        powers = np.frexp(lengths.astype(np.float64))[1]
        documents += np.bincount(powers, minlength=65)
        np.add.at(tokens, powers, lengths)
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    total = len(starts) - 1
    cumulated = np.cumsum(exact)
    median, p90, p99 = (int(np.searchsorted(cumulated, share * total)) for share in (0.5, 0.9, 0.99))
    buckets = [
        LengthBucket((1 << power) >> 1, max((1 << power) - 1, 0), int(documents[power]), int(tokens[power]))
        for power in range(_power(shortest), _power(longest) + 1)
    ]
    return LengthStatistics(shortest, longest, int(starts[-1]) / total, median, p90, p99, buckets)


def _power(length: int) -> int:
    """The smallest power of two that is above a length, as its exponent."""
    return length.bit_length()


def _samples(prepared: PreparedData, split: Split, count: int, tokens: int) -> Iterator[TextSample]:
    """Samples around the beginnings of documents that are evenly spread: a quarter of each lies before it."""
    starts = prepared.document_boundaries(split)
    documents, total = len(starts) - 1, int(starts[-1])
    middles = {documents * (2 * number + 1) // (2 * count) for number in range(count)} if total else set()
    for document in sorted(middles):
        position = max(min(int(starts[document]) - tokens // 4, total - tokens), 0)
        yield TextSample(split, position, list(_passages(prepared, split, position, min(position + tokens, total))))


def _passages(prepared: PreparedData, split: Split, start: int, stop: int) -> Iterator[Passage]:
    starts, tokens = prepared.document_boundaries(split), prepared.tokens(split)
    first = int(np.searchsorted(starts, start, side="right")) - 1
    after = int(np.searchsorted(starts, stop, side="left"))
    for document, (begin, end) in enumerate(pairwise(starts[first : after + 1].tolist()), first):
        ids = tokens.read(max(begin, start), min(end, stop)).tolist()
        check_token_ids(prepared, split, max(ids, default=0), max(begin, start))
        text = prepared.tokenizer.decode(ids)
        yield Passage(document, end - begin, len(ids), begin >= start, end <= stop, text)
