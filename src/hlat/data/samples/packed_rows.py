"""Reading of packed rows: ranges of tokens -> rows of S inputs and S labels.

    concat     row i is tokens [i S, i S + S], both ends included: consecutive rows share one token
    best fit   row i is pieces of documents, one after the other, and padding

Where a row cuts a document, the label of the last input is still the document's next token.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hlat.data.prepared.shards import TokenArray
from hlat.data.samples.best_fit import BestFitPlan
from hlat.data.samples.row_filling import NO_LABEL, RowSegment, fill_row
from hlat.model import IGNORED

Int64s = npt.NDArray[np.int64]

_NO_POSITIONS = np.empty(0, dtype=np.int64)


class TokenRange(NamedTuple):
    """Consecutive tokens of the split, as part of a row.

    Attributes:
        start: position of the first token in the split.
        length: number of inputs.
        has_next: True if the token after the last input is its label.
        starts_document: True if the first token begins a document.
    """

    start: int
    length: int
    has_next: bool
    starts_document: bool


class PackedRows(Protocol):
    """The rows of a range of documents."""

    def __len__(self) -> int: ...

    def token_ranges(self, row: int) -> list[TokenRange]:
        """Return the token ranges of a row, in order; at most S tokens."""


@dataclass(frozen=True)
class ConcatRows:
    """Documents joined and cut every ``length`` tokens; a shorter rest at the end is left out.

    Attributes:
        first: position of the first token in the split.
        tokens: number of tokens.
        length: tokens per row, S.
    """

    first: int
    tokens: int
    length: int

    def __len__(self) -> int:
        return max((self.tokens - 1) // self.length, 0)

    def token_ranges(self, row: int) -> list[TokenRange]:
        """Return the single token range of a row."""
        return [TokenRange(self.first + row * self.length, self.length, True, False)]


@dataclass(frozen=True)
class BestFitRows:
    """Rows in which documents are kept uncut where they fit.

    Attributes:
        starts: boundaries of the split's documents: the start of each, and the end of the last.
        first: index of the document that is document 0 of ``fitted``.
        fitted: the packing plan.
    """

    starts: npt.NDArray[np.uint64]
    first: int
    fitted: BestFitPlan

    def __len__(self) -> int:
        return len(self.fitted.rows) - 1

    def token_ranges(self, row: int) -> list[TokenRange]:
        """Return the token ranges of a row."""
        plan, (begin, end) = self.fitted, self.fitted.rows[row : row + 2]
        ranges = []
        for index in range(begin, end):
            document, offset = self.first + int(plan.documents[index]), int(plan.offsets[index])
            start, length = int(self.starts[document]) + offset, int(plan.lengths[index])
            ranges.append(TokenRange(start, length, start + length < int(self.starts[document + 1]), offset == 0))
        return ranges


@dataclass(frozen=True)
class RowBatch:
    """Rows that have been read, shape (B, S) each.

    Attributes:
        inputs_BS: token ids, int64; 0 for padding.
        labels_BS: the token after each input, int64; ``IGNORED`` where there is none.
        positions_BS: position of each token in its document, int64; None unless documents are isolated.
        highest_token: the highest token id, and its position in the split.
    """

    inputs_BS: Int64s
    labels_BS: Int64s
    positions_BS: Int64s | None
    highest_token: tuple[int, int]


class RowReader:
    """Reads rows of a split.

    Args:
        tokens: the tokens of the split.
        length: tokens per row, S.
        starts: document boundaries, to isolate documents; None not to isolate them.
    """

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
        """Return True for a single range of S tokens with a label for the last; False if its document ends there."""
        return len(row) == 1 and row[0].length == self._length and row[0].has_next

    def _read_consecutive(self, starts: list[int]) -> RowBatch:
        """Read rows of S consecutive tokens and the token after them, by far the most common kind."""
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
        """Return the starts of documents inside a range, relative to it.

        The first token of the range is excluded, the token after its last one is included.
        """
        if self._starts is None:
            return _NO_POSITIONS
        low, high = np.searchsorted(self._starts, [token_range.start + 1, token_range.start + token_range.length + 1])
        return np.unique(self._starts[low:high].astype(np.int64) - token_range.start)
