"""Prepared data divided into rows of S inputs and S labels, and the reading of these rows.

    concat     row i is tokens [i S, i S + S], both ends included: consecutive rows share one token
    best fit   row i is pieces of documents, one after the other, and padding

    documents of a source --pack_rows--> ConcatRows | BestFitRows --RowReader--> inputs and labels of any row

Where a row cuts a document, the label of the last input is still the document's next token.

The plan of ``best-fit`` packing is computed once and stored:

    <prepared>/rows/best-fit-<S>-<data>-<first document>-<documents>/
        rows.npy, documents.npy, offsets.npy, lengths.npy, and sums.json with their checksums

A plan that does not match its checksums is computed again. If the folder is not writable, every process computes the
plan for itself: a million documents take a second.
"""

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hlat.config import DataConfig
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.prepared.shards import TokenArray
from hlat.data.samples.packing import NO_LABEL, BestFitPlan, Int64s, RowSegment, fill_row, fit_documents
from hlat.data.source_file import sha256_of
from hlat.data.stores.local_files import checksum_matches, with_checksum
from hlat.model import IGNORED
from hlat.runtime.errors import DataError
from hlat.runtime.storage.local_files import sync_to_disk, write_atomic

_NO_POSITIONS = np.empty(0, dtype=np.int64)


class TokenRange(NamedTuple):
    """Consecutive tokens of the split, as part of a row."""

    start: int  # position of the first token in the split
    length: int  # number of inputs
    has_next: bool  # True if the token after the last input is its label
    starts_document: bool  # True if the first token begins a document


@dataclass(frozen=True)
class ConcatRows:
    """Documents joined and cut every ``length`` tokens; a shorter rest at the end is left out."""

    first: int  # position of the first token in the split
    tokens: int
    length: int  # tokens per row, S

    def __len__(self) -> int:
        return max((self.tokens - 1) // self.length, 0)

    def token_ranges(self, row: int) -> list[TokenRange]:
        """Return the token ranges of a row, in order; at most S tokens."""
        return [TokenRange(self.first + row * self.length, self.length, True, False)]


@dataclass(frozen=True)
class BestFitRows:
    """Rows in which documents are kept uncut where they fit."""

    starts: npt.NDArray[np.uint64]  # boundaries of the split's documents: the start of each, and the end of the last
    first: int  # index of the document that is document 0 of ``fitted``
    fitted: BestFitPlan  # the packing plan

    def __len__(self) -> int:
        return len(self.fitted.rows) - 1

    def token_ranges(self, row: int) -> list[TokenRange]:
        plan, (begin, end) = self.fitted, self.fitted.rows[row : row + 2]
        ranges = []
        for index in range(begin, end):
            document, offset = self.first + int(plan.documents[index]), int(plan.offsets[index])
            start, length = int(self.starts[document]) + offset, int(plan.lengths[index])
            ranges.append(TokenRange(start, length, start + length < int(self.starts[document + 1]), offset == 0))
        return ranges


@dataclass(frozen=True)
class RowBatch:
    """Rows that have been read, shape (B, S) each."""

    inputs_BS: Int64s  # token ids, int64; 0 for padding
    labels_BS: Int64s  # the token after each input, int64; ``IGNORED`` where there is none
    positions_BS: Int64s | None  # position of each token in its document, int64; None unless documents are isolated
    highest_token: tuple[int, int]  # the highest token id, and its position in the split


class RowReader:
    """Reads rows of ``length`` tokens; ``starts`` are document boundaries, None not to isolate documents."""

    def __init__(self, tokens: TokenArray, length: int, starts: npt.NDArray[np.uint64] | None) -> None:
        self._tokens, self._length, self._starts = tokens, length, starts

    def read(self, rows: list[list[TokenRange]]) -> RowBatch:
        """Read one row for each list of token ranges."""
        if rows and self._starts is None and all(self._is_consecutive(row) for row in rows):
            return self._read_consecutive([row[0].start for row in rows])
        shape = (len(rows), self._length)
        inputs, labels = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        positions = None if self._starts is None else np.empty(shape, dtype=np.int64)
        highest = (-1, 0)
        for row, ranges in enumerate(rows):
            segments = [self._segment(token_range) for token_range in ranges]
            fill_row(segments, inputs[row], labels[row], None if positions is None else positions[row])
            for token_range, segment in zip(ranges, segments, strict=True):
                if segment.tokens.max() > highest[0]:
                    highest = (int(segment.tokens.max()), token_range.start + int(segment.tokens.argmax()))
        labels[labels == NO_LABEL] = IGNORED
        return RowBatch(inputs, labels, positions, highest)

    def _is_consecutive(self, row: list[TokenRange]) -> bool:
        """Return True for a single range of S tokens with a label for the last."""
        return len(row) == 1 and row[0].length == self._length and row[0].has_next

    def _read_consecutive(self, starts: list[int]) -> RowBatch:
        # By far the most common rows, so they have a short way of their own.
        tokens = np.empty((len(starts), self._length + 1), dtype=np.int64)
        for row, start in enumerate(starts):
            self._tokens.read_into(start, tokens[row])
        row, column = divmod(int(tokens.argmax()), self._length + 1)
        highest = (int(tokens[row, column]), starts[row] + column)
        return RowBatch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), None, highest)

    def _segment(self, token_range: TokenRange) -> RowSegment:
        tokens = self._tokens.read(token_range.start, token_range.start + token_range.length + token_range.has_next)
        return RowSegment(tokens, token_range.length, token_range.starts_document, self._document_starts(token_range))

    def _document_starts(self, token_range: TokenRange) -> Int64s:
        """Return the starts of documents inside a range, relative to it."""
        if self._starts is None:
            return _NO_POSITIONS
        # Without the first token of the range, with the token after its last one, which is a label.
        low, high = np.searchsorted(self._starts, [token_range.start + 1, token_range.start + token_range.length + 1])
        return np.unique(self._starts[low:high].astype(np.int64) - token_range.start)


_PLAN_ARRAYS = ("rows", "documents", "offsets", "lengths")
_PLAN_SUMS = "sums.json"
_FITTED_TOGETHER = 1 << 22  # documents packed jointly; more would take gigabytes and hardly reduce padding


@dataclass(frozen=True)
class DocumentRange:
    """Consecutive documents of a split, and their tokens."""

    first_document: int  # index of the first document
    documents: int
    first_token: int  # position of the first token in the split
    tokens: int  # number of tokens; the last document may be cut off

    def boundaries(self, prepared: PreparedData) -> Int64s:
        """Return the first token of each document in the split, and the end of the last, int64."""
        end = self.first_document + self.documents + 1
        return prepared.document_boundaries("train")[self.first_document : end].astype(np.int64)


@dataclass(frozen=True)
class PackingWaste:
    """Padding and cut documents of ``best-fit`` packing."""

    padding: int  # positions without a token
    positions: int  # all positions of an epoch
    cut: int  # documents longer than a row, which are cut
    documents: int

    def __str__(self) -> str:
        fraction = self.padding / max(self.positions, 1)
        return (
            f"best-fit: {self.padding:,} of {self.positions:,} positions are padding ({fraction:.2%}); "
            f"{self.cut:,} of {self.documents:,} documents are longer than a sequence and are cut"
        )


def all_training_documents(prepared: PreparedData) -> DocumentRange:
    """Return the complete training split, whose sources follow one another without a gap."""
    record = prepared.manifest.splits["train"]
    return DocumentRange(0, record.documents, 0, record.tokens)


def source_ranges(prepared: PreparedData, config: DataConfig) -> list[DocumentRange]:
    """Return the training documents of each source, up to its max_tokens; an empty range if it has none."""
    ranges, document, token = {}, 0, 0
    for record in prepared.manifest.splits["train"].sources:
        ranges[record.source] = DocumentRange(document, record.documents, token, record.tokens)
        document, token = document + record.documents, token + record.tokens
    return [
        _limit_tokens(prepared, ranges.get(index, DocumentRange(0, 0, 0, 0)), source.max_tokens)
        for index, source in enumerate(config.sources)
    ]


def _limit_tokens(prepared: PreparedData, documents: DocumentRange, limit: int | None) -> DocumentRange:
    """Return the leading part of a range, of at most ``limit`` tokens; its last document may be cut off."""
    if limit is None or documents.tokens <= limit:
        return documents
    count = int(np.searchsorted(documents.boundaries(prepared)[1:], documents.first_token + limit, "right"))
    return DocumentRange(documents.first_document, count, documents.first_token, limit)


_WHOLE_DOCUMENTS = 20  # a document at a border stays whole unless it is longer than the text divided by this


def part_of(
    prepared: PreparedData, documents: DocumentRange, before: Sequence[int], own: int | None, packing: str
) -> DocumentRange:
    """Return the part of a range behind others: whole documents, if possible, with at least ``own`` tokens.

    ``before`` are the tokens of each part before it, at least; ``own`` None takes all that are left.
    """
    if not before and own is None:
        return documents
    # The last document may be cut off.
    starts = np.minimum(documents.boundaries(prepared) - documents.first_token, documents.tokens)

    def border(token: int) -> int:
        whole = int(starts[min(int(np.searchsorted(starts, token)), len(starts) - 1)])
        # Of one huge document, rows can be shared out; packing needs whole ones.
        cut = packing == "concat" and whole - token > documents.tokens // _WHOLE_DOCUMENTS
        return token if cut else whole

    begin = 0
    for tokens in before:
        begin = border(begin + tokens)
    end = documents.tokens if own is None else border(begin + own)
    first, stop = np.searchsorted(starts[:-1], [begin, end]).tolist()
    return DocumentRange(documents.first_document + first, stop - first, documents.first_token + begin, end - begin)


def pack_rows(prepared: PreparedData, documents: DocumentRange, length: int, packing: str) -> ConcatRows | BestFitRows:
    """Divide a range of documents into rows of ``length`` tokens; packing is "concat" or "best-fit"."""
    if packing == "concat":
        return ConcatRows(documents.first_token, documents.tokens, length)
    return BestFitRows(
        prepared.document_boundaries("train"), documents.first_document, _load_or_fit(prepared, documents, length)
    )


def measure_waste(prepared: PreparedData, ranges: Sequence[DocumentRange], rows: int, length: int) -> PackingWaste:
    """Count the padding and the cut documents in all ``best-fit`` rows of some ranges."""
    sizes = np.concatenate([np.diff(documents.boundaries(prepared)) for documents in ranges])
    positions = rows * length
    return PackingWaste(positions - int(sizes.sum()), positions, int((sizes > length).sum()), len(sizes))


def _load_or_fit(prepared: PreparedData, documents: DocumentRange, length: int) -> BestFitPlan:
    name = f"best-fit-{length}-{prepared.fingerprint[:16]}-{documents.first_document}-{documents.documents}"
    folder = prepared.dir / "rows" / name
    if (stored := _load_plan(folder)) is not None:
        return stored
    computed = _fit_in_chunks(np.diff(documents.boundaries(prepared)), length)
    with suppress(OSError):
        _save_plan(computed, folder)
    return _load_plan(folder) or computed  # the stored one is mapped: processes share its memory


def _load_plan(folder: Path) -> BestFitPlan | None:
    """Load a stored plan; None if it is missing or damaged."""
    try:
        sums = json.loads((folder / _PLAN_SUMS).read_bytes())
        if not checksum_matches(sums) or any(sha256_of(folder / f"{name}.npy") != sums[name] for name in _PLAN_ARRAYS):
            return None
        return BestFitPlan(
            *(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _PLAN_ARRAYS)
        )
    except (OSError, ValueError, KeyError, AttributeError, RecursionError, DataError):
        return None


def _fit_in_chunks(sizes: np.ndarray, length: int) -> BestFitPlan:
    """Pack documents in chunks of ``_FITTED_TOGETHER``, and join the plans."""
    chunks, rows, pieces = [], 0, 0
    for first in range(0, max(len(sizes), 1), _FITTED_TOGETHER):
        chunk = fit_documents(sizes[first : first + _FITTED_TOGETHER], length)
        chunks.append((chunk.rows[:-1] + pieces, chunk.documents + first, chunk.offsets, chunk.lengths))
        rows, pieces = rows + len(chunk.rows) - 1, pieces + len(chunk.lengths)
    starts, documents, offsets, lengths = (np.concatenate(column) for column in zip(*chunks, strict=True))
    return BestFitPlan(np.append(starts, pieces), documents, offsets, lengths)


def _save_plan(plan: BestFitPlan, folder: Path) -> None:
    # Written aside, then renamed: an existing folder is complete.
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        for name in _PLAN_ARRAYS:
            with (temporary / f"{name}.npy").open("wb") as file:
                np.save(file, getattr(plan, name), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        sums = with_checksum({name: sha256_of(temporary / f"{name}.npy") for name in _PLAN_ARRAYS})
        write_atomic(temporary / _PLAN_SUMS, json.dumps(sums).encode())
        sync_to_disk(temporary)
        if _load_plan(folder) is None:  # otherwise another process has just stored the same plan
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
