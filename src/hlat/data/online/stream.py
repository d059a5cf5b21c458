"""The documents of one stream of one source -> rows, one after the other, for ever.

    turns of the part --> block --> document --> pieces --> tokens, an end token --> rows

``Cursor`` is where the next row begins. Text is tokenized outside, many streams at a time: a stream says how much it
lacks, gives pieces of documents and gets their tokens.

Under ``concat`` a row is the next S tokens, and its last label the first token of the row after it; a long document is
tokenized piece by piece, as its tokens are needed: nobody waits for the end of a book. Under ``best-fit``
as many documents as fill ``_GROUP`` rows are fitted together; a row is then known by where its group begins and its
number in it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hlat.data.formats import Content
from hlat.data.samples import BestFitPlan, RowSegment, fit_documents

_GROUP = 32  # rows that are fitted together; a larger group pads less and holds more in memory
_PIECE = 1 << 14  # characters

Ids = npt.NDArray[np.uint32]
_NOWHERE = np.empty(0, dtype=np.int64)


class StreamCursor(NamedTuple):
    """Where a stream goes on.

    Attributes:
        turn: how many blocks it has left behind.
        row: of the block, the row of the document that is next.
        place: concat: tokens of it that are done. best-fit: rows of the group that begins with it that are done.
    """

    turn: int = 0
    row: int = 0
    place: int = 0


class StreamDocument(NamedTuple):
    """A document of a stream: the turn and the row it is from, its text or tokens."""

    turn: int
    row: int
    content: Content


class _UntokenizedPiece(NamedTuple):
    turn: int
    row: int
    last: bool  # of the document
    content: Content


class _TokenizedPiece(NamedTuple):
    turn: int
    row: int
    first: int  # tokens of the document before these
    last: bool  # whether it ends with them
    ids: Ids


@dataclass(frozen=True)
class RowSettings:
    """How rows are made.

    Attributes:
        length: of a row, S.
        packing: "concat" or "best-fit".
        isolate: whether documents are to be told apart.
        end: the end token; None for none.
    """

    length: int
    packing: str
    isolate: bool
    end: int | None


class RowStream:
    """Rows of one stream of one source.

    Args:
        settings: how rows are made.
        documents: the documents from a place on, (turn, row) -> iterator; without null and empty ones and those of
            the validation split.
        cursor: where to begin.
        cut: (text, characters of a piece at least) -> pieces whose tokens, joined, are those of the text.
    """

    def __init__(
        self,
        settings: RowSettings,
        documents: Callable[[int, int], Iterator[StreamDocument]],
        cursor: StreamCursor,
        cut: Callable[[str, int], Iterator[str]],
    ) -> None:
        self._settings, self._cursor, self._cut = settings, cursor, cut
        self._pieces = self._pieces_of(documents(cursor.turn, cursor.row))
        self._ready: deque[_TokenizedPiece] = deque()
        self._held = -cursor.place  # tokens at hand; concat only
        self._wanted: deque[_UntokenizedPiece] = deque()
        self._before = 0  # tokens that the document which is being tokenized already has
        self._group: tuple[BestFitPlan, list[_TokenizedPiece]] | None = None

    @property
    def cursor(self) -> StreamCursor:
        """Where the next row begins."""
        return self._cursor

    def missing_tokens(self, rows: int) -> int:
        """How many more tokens it needs to make so many rows; best-fit may need yet more when it has them."""
        length = self._settings.length
        if self._settings.packing == "concat":
            return max(rows * length + 1 - self._held, 0)
        complete, rest = self._groups_at_hand()
        if self._group is None:
            if not complete:
                return _GROUP * length - rest
            self._group = self._take_group()
            complete -= 1
        left = len(self._group[0].rows) - 1 - self._cursor.place
        missing = -(-max(rows - left, 0) // _GROUP) - complete  # a group makes _GROUP rows at least
        return max(missing * _GROUP * length - rest, 0)

    def _groups_at_hand(self) -> tuple[int, int]:
        """How many groups the documents at hand make, and the tokens that are left over."""
        complete = rest = 0
        for one in self._ready:
            rest += len(one.ids)
            if rest >= _GROUP * self._settings.length:
                complete, rest = complete + 1, 0
        return complete, rest

    def next_pieces(self, tokens: float, characters: float) -> list[Content]:
        """The next documents or pieces, of about so many tokens or one more of them; ``give`` has to follow.

        Args:
            tokens: how many are lacking.
            characters: of text for each token, as far as is known.
        """
        while tokens > 0:
            piece = next(self._pieces)
            self._wanted.append(piece)
            tokens -= len(piece.content) / (characters if isinstance(piece.content, str) else 1)
        return [piece.content for piece in self._wanted]

    def _pieces_of(self, documents: Iterator[StreamDocument]) -> Iterator[_UntokenizedPiece]:
        for turn, row, content in documents:
            if self._settings.packing == "concat" and isinstance(content, str):
                pieces = self._cut(content, _PIECE)
                piece = next(pieces)
                for after in pieces:
                    yield _UntokenizedPiece(turn, row, False, piece)
                    piece = after
                yield _UntokenizedPiece(turn, row, True, piece)
            else:
                yield _UntokenizedPiece(turn, row, True, content)

    def add_tokens(self, tokens: list[Ids]) -> None:
        """The tokens of what ``documents`` returned."""
        end = [] if self._settings.end is None else [np.array([self._settings.end], dtype=np.uint32)]
        for ids in tokens:
            turn, row, last, _ = self._wanted.popleft()
            whole = np.concatenate([ids, *end]) if last and end else ids
            if len(whole) or (last and self._before):  # a document without a token is none
                self._ready.append(_TokenizedPiece(turn, row, self._before, last, whole))
                self._held += len(whole)
            self._before = 0 if last else self._before + len(whole)
        assert not self._wanted, "every piece has its tokens"

    def next_row(self) -> list[RowSegment]:
        """The next row; ``lacks(1)`` must be 0."""
        return self._joined_row() if self._settings.packing == "concat" else self._fitted_row()

    # --- concat ------------------------------------------------------------------------------------------------------

    def _joined_row(self) -> list[RowSegment]:
        length, needed, parts = self._settings.length, self._settings.length + 1, []
        begins, place = [], self._cursor.place
        while True:
            turn, row, first, last, ids = self._ready[0]
            piece = ids[place - first : place - first + needed]
            parts.append(piece)
            needed -= len(piece)
            place += len(piece)
            if not needed:  # the label of the last token is the first one of the next row
                self._cursor = StreamCursor(turn, row, place - 1)
                break
            self._ready.popleft()
            if last:
                place = 0
                begins.append(length + 1 - needed)
        self._held -= length
        tokens = np.concatenate(parts)
        return [
            RowSegment(tokens, length, False, np.array(begins, dtype=np.int64) if self._settings.isolate else _NOWHERE)
        ]

    # --- best-fit ----------------------------------------------------------------------------------------------------

    def _fitted_row(self) -> list[RowSegment]:
        assert self._group is not None, "lacks has seen that there is one"
        fitted, documents = self._group
        number = self._cursor.place
        pieces = []
        for index in range(*fitted.rows[number : number + 2]):
            ids, offset = documents[fitted.documents[index]].ids, fitted.offsets[index]
            length = int(fitted.lengths[index])
            tokens = ids[offset : offset + length + 1]  # with the token after it, where the document goes on
            pieces.append(RowSegment(tokens, length, offset == 0, _NOWHERE))
        if number + 2 < len(fitted.rows):
            self._cursor = self._cursor._replace(place=number + 1)
        else:
            self._cursor = self._after(documents[-1])
            self._group = self._take_group() if self._groups_at_hand()[0] else None
        return pieces

    def _take_group(self) -> tuple[BestFitPlan, list[_TokenizedPiece]]:
        """The next documents, as many as fill the rows of a group."""
        documents, tokens = [], 0
        while tokens < _GROUP * self._settings.length:
            documents.append(self._ready.popleft())
            tokens += len(documents[-1].ids)
        return fit_documents([len(one.ids) for one in documents], self._settings.length), documents

    def _after(self, last: _TokenizedPiece) -> StreamCursor:
        """The document after the last one of a group; as a place where reading can go on, the row after it."""
        return StreamCursor(last.turn, last.row + 1)
