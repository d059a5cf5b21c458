"""Packing: document lengths -> which documents share a row of S tokens; a row -> its inputs and labels.

    lengths of documents --fit_documents--> BestFitPlan: pieces of documents per row
    segments of documents --fill_row--> S inputs, S labels, positions

Best fit: a document longer than S is cut into rows of its own; its rest, and every shorter document, is placed, longest
first, into the row where it leaves the least room (best-fit decreasing; Ding et al. 2024, "Fewer truncations improve
language modeling"). Rows with the same room left are interchangeable, so documents of one length are placed together,
many at a time.

A label is the token after its input. If documents are isolated, the last token of a document has no label, and
positions count from the start of the document, or of the row if that is later. The rest of a row is padding: input 0,
no label.

Tokenizing workers import this module, so it must not import torch.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NO_LABEL = -1

Numbers = npt.NDArray[Any]


class RowSegment(NamedTuple):
    """Consecutive tokens of one row, of one document or of several joined."""

    tokens: Numbers  # the inputs, followed by the label of the last one if there is one
    length: int  # number of inputs
    starts_document: bool  # True if the first token begins a document
    # Indexes in ``tokens``, after the first, at which documents begin; used only to isolate them.
    document_starts: Numbers


def fill_row(
    segments: Iterable[RowSegment], inputs_S: Numbers, labels_S: Numbers, positions_S: Numbers | None = None
) -> None:
    """Write a row of at most S tokens into arrays of shape (S,); without positions, documents are joined."""
    inputs_S[:], labels_S[:], position = 0, NO_LABEL, 0
    for segment in segments:
        end = position + segment.length
        inputs_S[position:end] = segment.tokens[: segment.length]
        labels_S[position : position + len(segment.tokens) - 1] = segment.tokens[1:]
        if positions_S is not None:
            positions_S[position:end] = _positions(segment)
            # A document does not predict the first token of the next.
            labels_S[position + segment.document_starts - 1] = NO_LABEL
        elif segment.starts_document and position > 0:
            # Documents are joined: the label of a document's last token is the first token of the next.
            labels_S[position - 1] = segment.tokens[0]
        position = end
    if positions_S is not None:
        # Padding counts as a document of its own.
        positions_S[position:] = np.arange(len(positions_S) - position)


def _positions(segment: RowSegment) -> Numbers:
    """Return the position of each input in its document, shape (length,)."""
    inside = segment.document_starts[segment.document_starts < segment.length]
    positions = np.arange(segment.length)
    if len(inside):
        starts = np.concatenate([[0], inside])
        positions -= np.repeat(starts, np.diff(np.append(starts, segment.length)))
    return positions


Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BestFitPlan:
    """Rows, and the pieces of documents in each."""

    rows: Int64s  # index of the first piece of each row, and the number of pieces at the end: int64, shape (rows + 1,)
    documents: Int64s  # document of each piece, int64, shape (pieces,)
    offsets: Int64s  # offset of each piece in its document, in tokens, int64, shape (pieces,)
    lengths: Int64s  # tokens of each piece, int64, shape (pieces,)


def fit_documents(lengths: npt.ArrayLike, room: int) -> BestFitPlan:
    """Pack documents, given by ``lengths`` in tokens, into rows of ``room`` tokens.

    Every token is in exactly one piece; rows are in the order of their first document. Empty documents are left out.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    cut_documents, cut_offsets = _full_rows(sizes, room)
    rest = sizes % room
    pieces = np.flatnonzero(rest)
    bins = _best_fit(rest[pieces], room)
    documents = np.concatenate([cut_documents, pieces])
    offsets = np.concatenate([cut_offsets, sizes[pieces] - rest[pieces]])
    piece_lengths = np.concatenate([np.full(len(cut_documents), room, dtype=np.int64), rest[pieces]])
    row_of = np.concatenate([np.arange(len(cut_documents)), len(cut_documents) + bins])
    return _in_order(row_of, documents, offsets, piece_lengths)


def _full_rows(sizes: Int64s, room: int) -> tuple[Int64s, Int64s]:
    """Return document and offset of every piece that fills a row by itself."""
    counts = sizes // room
    documents = np.repeat(np.arange(len(sizes)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return documents, (np.arange(len(documents)) - first) * room


def _best_fit(sizes: Int64s, room: int) -> Int64s:
    """Assign pieces with sizes in [1, room) to bins; return the bin of each."""
    bins = np.empty(len(sizes), dtype=np.int64)
    longest_first = np.argsort(-sizes, kind="stable")
    ordered = sizes[longest_first]
    opened = 0
    open_bins: defaultdict[int, list[Int64s]] = defaultdict(list)  # keyed by the room left in them
    rooms = 0  # bit r is set if some bin has room r left
    for alike in np.split(longest_first, np.flatnonzero(np.diff(ordered)) + 1) if len(sizes) else ():
        size, waiting = int(sizes[alike[0]]), alike
        while len(waiting):
            fitting = rooms >> size
            if fitting:
                # The lowest bit: the bin in which the piece leaves the least room.
                left = size + (fitting & -fitting).bit_length() - 1
                candidates = open_bins[left].pop()
                rooms ^= 0 if open_bins[left] else 1 << left
            else:
                left, count = room, -(-len(waiting) // (room // size))
                candidates = np.arange(opened, opened + count)
                opened += count
            per_bin = left // size
            used = min(len(candidates), -(-len(waiting) // per_bin))
            placed, waiting = waiting[: used * per_bin], waiting[used * per_bin :]
            bins[placed] = np.repeat(candidates[:used], per_bin)[: len(placed)]
            # Bins that received as many as fit; the last used bin may have received fewer.
            filled = len(placed) // per_bin
            changed = (
                (candidates[used:], left),
                (candidates[:filled], left - per_bin * size),
                (candidates[filled:used], left - (len(placed) - filled * per_bin) * size),
            )
            for rest, space in changed:
                if len(rest) and space:
                    open_bins[space].append(rest)
                    rooms |= 1 << space
    return bins


def _in_order(row_of: Int64s, documents: Int64s, offsets: Int64s, lengths: Int64s) -> BestFitPlan:
    """Sort pieces by row, rows by their first document, and pieces within a row by document."""
    by_document = np.lexsort((offsets, documents))
    _, first = np.unique(row_of[by_document], return_index=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    final = rank[row_of]
    order = np.lexsort((offsets, documents, final))
    counts = np.bincount(final, minlength=len(first)) if len(final) else np.zeros(0, dtype=np.int64)
    rows = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return BestFitPlan(rows, documents[order], offsets[order], lengths[order])
