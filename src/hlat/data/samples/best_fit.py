"""Lengths of documents -> rows of S tokens in which they are kept whole where they fit ("best fit").

A document longer than S is cut into rows of its own; what is left of it, and every shorter one, is put, longest first,
where it leaves the least room (best-fit decreasing; Ding et al. 2024, "Fewer truncations improve language modeling").
Whatever rows have the same room left are alike, so documents of one length are placed together, many at a time.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BestFitPlan:
    """Rows, and the pieces of documents that each is made of.

    Attributes:
        rows: where the pieces of each row begin, and where the last one's end: int64, (rows + 1,).
        documents: which document each piece is of, int64.
        offsets: where in its document it begins, in tokens, int64.
        lengths: its tokens, int64.
    """

    rows: Int64s
    documents: Int64s
    offsets: Int64s
    lengths: Int64s


def fit_documents(lengths: npt.ArrayLike, room: int) -> BestFitPlan:
    """Put documents of so many tokens into rows of ``room`` tokens.

    Args:
        lengths: tokens of each document; empty ones are left out.
        room: tokens of a row, S.

    Returns:
        Every token of every document in exactly one piece; rows in the order of their first document.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    cut_documents, cut_offsets = _whole_rows(sizes, room)
    rest = sizes % room
    pieces = np.flatnonzero(rest)
    bins = _best_fit(rest[pieces], room)
    documents = np.concatenate([cut_documents, pieces])
    offsets = np.concatenate([cut_offsets, sizes[pieces] - rest[pieces]])
    taken = np.concatenate([np.full(len(cut_documents), room, dtype=np.int64), rest[pieces]])
    row_of = np.concatenate([np.arange(len(cut_documents)), len(cut_documents) + bins])
    return _in_order(row_of, documents, offsets, taken)


def _whole_rows(sizes: Int64s, room: int) -> tuple[Int64s, Int64s]:
    """Document and offset of every piece that fills a row by itself."""
    counts = sizes // room
    documents = np.repeat(np.arange(len(sizes)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return documents, (np.arange(len(documents)) - first) * room


def _best_fit(sizes: Int64s, room: int) -> Int64s:
    """The bin of each piece; sizes in [1, room)."""
    bins = np.empty(len(sizes), dtype=np.int64)
    longest_first = np.argsort(-sizes, kind="stable")
    ordered = sizes[longest_first]
    opened = 0
    open_bins: defaultdict[int, list[Int64s]] = defaultdict(list)  # by the room that is left in them
    rooms = 0  # a bit for each room that some bin has left
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
            each = left // size
            used = min(len(candidates), -(-len(waiting) // each))
            now, waiting = waiting[: used * each], waiting[used * each :]
            bins[now] = np.repeat(candidates[:used], each)[: len(now)]
            full = len(now) // each  # bins that took as many as fit; the one after them may have taken fewer
            changed = (
                (candidates[used:], left),
                (candidates[:full], left - each * size),
                (candidates[full:used], left - (len(now) - full * each) * size),
            )
            for again, space in changed:
                if len(again) and space:
                    open_bins[space].append(again)
                    rooms |= 1 << space
    return bins


def _in_order(row_of: Int64s, documents: Int64s, offsets: Int64s, lengths: Int64s) -> BestFitPlan:
    """Pieces sorted by row, rows by their first document, pieces within a row by document."""
    by_document = np.lexsort((offsets, documents))
    _, first = np.unique(row_of[by_document], return_index=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    final = rank[row_of]
    order = np.lexsort((offsets, documents, final))
    counts = np.bincount(final, minlength=len(first)) if len(final) else np.zeros(0, dtype=np.int64)
    rows = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return BestFitPlan(rows, documents[order], offsets[order], lengths[order])
