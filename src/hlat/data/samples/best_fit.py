"""Best-fit packing: document lengths -> rows of S tokens in which documents stay uncut where they fit.

A document longer than S is cut into rows of its own; its rest, and every shorter document, is placed, longest first,
into the row where it leaves the least room (best-fit decreasing; Ding et al. 2024, "Fewer truncations improve language
modeling"). Rows with the same room left are interchangeable, so documents of one length are placed together, many at a
time.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BestFitPlan:
    """Rows, and the pieces of documents in each.

    Attributes:
        rows: index of the first piece of each row, and the number of pieces at the end: int64, shape (rows + 1,).
        documents: document of each piece, int64, shape (pieces,).
        offsets: offset of each piece in its document, in tokens, int64, shape (pieces,).
        lengths: tokens of each piece, int64, shape (pieces,).
    """

    rows: Int64s
    documents: Int64s
    offsets: Int64s
    lengths: Int64s


def fit_documents(lengths: npt.ArrayLike, room: int) -> BestFitPlan:
    """Pack documents into rows of ``room`` tokens.

    Args:
        lengths: tokens of each document; empty documents are left out.
        room: tokens of a row, S.

    Returns:
        A plan with every token of every document in exactly one piece; rows in the order of their first document.
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
    """Assign each piece to a bin (row); sizes are in [1, room). Return the bin of each piece."""
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
