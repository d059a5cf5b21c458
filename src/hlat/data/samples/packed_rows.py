"""Stretches of tokens -> rows of S inputs and S labels.

    concat     row i is tokens [i S, i S + S], both ends included: consecutive rows share one token
    best fit   row i is pieces of documents, one after the other, and padding

Where a piece ends before its document does, the label of its last token is the document's next one all the same.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hlat.data.prepared import TokenArray
from hlat.data.samples.best_fit import BestFitPlan
from hlat.data.samples.row_filling import NO_LABEL, RowSegment, fill_row
from hlat.model import IGNORED

Int64s = npt.NDArray[np.int64]

_NOWHERE = np.empty(0, dtype=np.int64)


class TokenRange(NamedTuple):
    """Consecutive tokens of a row.

    Attributes:
        start: position of the first one in the split.
        length: how many are inputs.
        follows: whether the token after the last input is its label.
        begins: whether the first one begins a document.
    """

    start: int
    length: int
    has_next: bool
    starts_document: bool


class PackedRows(Protocol):
    """Rows of one stretch of a split."""

    def __len__(self) -> int: ...

    def pieces(self, row: int) -> list[TokenRange]:
        """What a row is made of, in order; at most S tokens."""


@dataclass(frozen=True)
class ConcatRows:
    """Documents joined and cut every ``length`` tokens; fewer than that at the end are left out."""

    first: int
    tokens: int
    length: int

    def __len__(self) -> int:
        return max((self.tokens - 1) // self.length, 0)

    def pieces(self, row: int) -> list[TokenRange]:
        """All of a row."""
        return [TokenRange(self.first + row * self.length, self.length, True, False)]


@dataclass(frozen=True)
class BestFitRows:
    """Documents kept whole where they fit.

    Attributes:
        starts: where each document of the split begins, and where the last one ends.
        first: the first document that is meant by ``fitted``.
        fitted: the rows.
    """

    starts: npt.NDArray[np.uint64]
    first: int
    fitted: BestFitPlan

    def __len__(self) -> int:
        return len(self.fitted.rows) - 1

    def pieces(self, row: int) -> list[TokenRange]:
        """The pieces of a row."""
        found, (begin, end) = self.fitted, self.fitted.rows[row : row + 2]
        pieces = []
        for index in range(begin, end):
            document, offset = self.first + int(found.documents[index]), int(found.offsets[index])
            start, length = int(self.starts[document]) + offset, int(found.lengths[index])
            pieces.append(TokenRange(start, length, start + length < int(self.starts[document + 1]), offset == 0))
        return pieces


@dataclass(frozen=True)
class RowBatch:
    """Rows that have been read.

    Attributes:
        inputs_BS, labels_BS: int64; labels are ``IGNORED`` where there is none.
        positions_BS: place of each token in its document, int64; None where documents are not isolated.
        highest: the highest token id, and the position in the split where it stands.
    """

    inputs_BS: Int64s
    labels_BS: Int64s
    positions_BS: Int64s | None
    highest_token: tuple[int, int]


class RowReader:
    """Reads rows of a split.

    Args:
        tokens: of the split.
        length: of a row, S.
        starts: where its documents begin, if they are to be isolated.
    """

    def __init__(self, tokens: TokenArray, length: int, starts: npt.NDArray[np.uint64] | None) -> None:
        self._tokens, self._length, self._starts = tokens, length, starts

    def read(self, rows: list[list[TokenRange]]) -> RowBatch:
        """One row for each list of pieces."""
        if rows and self._starts is None and all(self._is_whole(row) for row in rows):
            return self._read_whole([row[0].start for row in rows])
        shape = (len(rows), self._length)
        inputs, labels = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        positions = None if self._starts is None else np.empty(shape, dtype=np.int64)
        highest = (-1, 0)
        for row, pieces in enumerate(rows):
            parts = [self._part(piece) for piece in pieces]
            fill_row(parts, inputs[row], labels[row], None if positions is None else positions[row])
            for piece, part in zip(pieces, parts, strict=True):
                if part.tokens.max() > highest[0]:
                    highest = (int(part.tokens.max()), piece.start + int(part.tokens.argmax()))
        labels[labels == NO_LABEL] = IGNORED
        return RowBatch(inputs, labels, positions, highest)

    def _is_whole(self, row: list[TokenRange]) -> bool:
        """True for consecutive tokens whose last one has a label, the token after it; not so where a document ends."""
        return len(row) == 1 and row[0].length == self._length and row[0].has_next

    def _read_whole(self, starts: list[int]) -> RowBatch:
        """Rows of S consecutive tokens and the one after them: most there are."""
        tokens = np.empty((len(starts), self._length + 1), dtype=np.int64)
        for row, start in enumerate(starts):
            self._tokens.read_into(start, tokens[row])
        row, column = divmod(int(tokens.argmax()), self._length + 1)
        highest = (int(tokens[row, column]), starts[row] + column)
        return RowBatch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), None, highest)

    def _part(self, piece: TokenRange) -> RowSegment:
        tokens = self._tokens.read(piece.start, piece.start + piece.length + piece.has_next)
        return RowSegment(tokens, piece.length, piece.starts_document, self._begins(piece))

    def _begins(self, piece: TokenRange) -> Int64s:
        """Where documents begin in a piece after its first token, the token after its last one included."""
        if self._starts is None:
            return _NOWHERE
        low, high = np.searchsorted(self._starts, [piece.start + 1, piece.start + piece.length + 1])
        return np.unique(self._starts[low:high].astype(np.int64) - piece.start)
