"""Streams: which samples, ranks and blocks belong to each, and the endless rows of one source in one stream.

    global sample g --(g + shift of its round) mod V--> stream s          a round is V samples, one of each stream
    stream s of source k --> partition s mod P of its blocks --> block, block, ...
    blocks of the partition --> document --> pieces --> tokens, an end token --> rows

**Assignment.** The shift is drawn anew for each round, so that a mixture with a periodic pattern cannot give a stream
always the same source. A data-parallel rank tokenizes the streams congruent to its index modulo the number of ranks,
hence takes the samples of these streams from each batch: as many as every other rank if V, ranks and batch divide one
another. A source with fewer blocks than streams has only P partitions of its blocks, P a divisor of V: the V / P
streams of a partition read the same documents, and each keeps every (V / P)-th row.

**Rows.** A ``StreamCursor`` is the position of the next row. The caller tokenizes, for many streams at a time: a stream
reports how many tokens it needs, hands out pieces of documents, and receives their tokens.

With ``concat`` packing a row is the next S tokens, and its last label the first token of the following row. A long
document is tokenized piece by piece as its tokens are needed, so that a row never waits for the end of a book. With
``best-fit`` packing, as many documents as fill ``_GROUP`` rows are packed together; the position of a row is then the
first document of its group and the row's index in the group.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hlat.config import BatchSchedule
from hlat.data.documents import Content
from hlat.data.samples.packing import BestFitPlan, RowSegment, fit_documents
from hlat.runtime.random_keys import stream_key

Int64s = npt.NDArray[np.int64]


def assign_streams(seed: int, streams: int, samples: npt.ArrayLike) -> Int64s:
    """Return the stream of each global sample, int64, the shape of ``samples``."""
    indexes = np.asarray(samples, dtype=np.int64)
    rounds, offsets = np.divmod(indexes, streams)
    distinct, inverse = np.unique(rounds, return_inverse=True)
    shifts = np.array([stream_key(seed, "round", int(number)) % streams for number in distinct], dtype=np.int64)
    assigned: Int64s = (offsets + shifts[inverse].reshape(indexes.shape)) % streams
    return assigned


def partition_count(streams: int, blocks: int) -> int:
    """Return the number of partitions of a source's blocks: the largest divisor of ``streams`` up to ``blocks``."""
    return max(count for count in range(1, streams + 1) if streams % count == 0 and count <= max(blocks, 1))


@dataclass(frozen=True)
class StreamAssignment:
    """The samples and streams of one data-parallel rank."""

    index: int  # this data-parallel rank
    ranks: int  # number of data-parallel ranks
    batches: BatchSchedule  # boundaries of the global batches
    streams: int
    seed: int  # seed of the order

    @property
    def is_even(self) -> bool:
        """True if each stream can be tokenized by a single rank."""
        # Batches of a ramp need no check. If V and the sizes of all batches are multiples of the number of ranks, so
        # are the parts into which the ends of rounds cut a batch; and of so many consecutive samples of a round each
        # rank has the same number.
        size = self.batches.size
        return self.streams % self.ranks == 0 and (size % self.streams == 0 or self.streams % size == 0)

    @property
    def owned(self) -> Int64s:
        """The streams that this rank tokenizes, int64; all if they cannot be divided evenly."""
        return np.arange(self.index, self.streams, self.ranks) if self.is_even else np.arange(self.streams)

    def samples(self, first: int) -> Int64s:
        """Return this rank's global samples, int64, ascending, of the step that begins with ``first``."""
        batch = self.batches.batch_at(first)
        step = np.arange(batch.start, batch.stop, dtype=np.int64)
        rank_batch = len(batch) // self.ranks
        if not self.is_even:
            return step[self.index * rank_batch : (self.index + 1) * rank_batch]
        selected: Int64s = step[assign_streams(self.seed, self.streams, step) % self.ranks == self.index]
        return selected

    def nearest_even_streams(self) -> int:
        """Return the nearest number of streams that can be divided among the ranks."""
        return next(
            count
            for distance in range(self.streams * self.batches.size + self.ranks)
            for count in (self.streams - distance, self.streams + distance)
            if count > 0 and StreamAssignment(self.index, self.ranks, self.batches, count, self.seed).is_even
        )


_GROUP = 32  # rows packed together; a larger group has less padding and takes more memory
_PIECE = 1 << 14  # minimum characters of a piece of a document

Ids = npt.NDArray[np.uint32]
_NO_POSITIONS = np.empty(0, dtype=np.int64)


class StreamCursor(NamedTuple):
    """The position of a stream's next row."""

    block: int = 0  # index of the current block in the endless sequence of the block partition
    row: int = 0  # row of the next document in that block
    # With concat, tokens of the document already used; with best-fit, rows already used of the group that begins with
    # the document.
    offset: int = 0


class StreamDocument(NamedTuple):
    """A document of a stream, with the place where a cursor finds it again."""

    block: int  # index of its block in the endless sequence of the block partition
    row: int  # its row in the block
    content: Content  # text or token ids


class _UntokenizedPiece(NamedTuple):
    """A document, or a piece of one, that is to be tokenized."""

    block: int
    row: int
    last: bool  # whether the document ends with it
    content: Content


class _TokenizedPiece(NamedTuple):
    """The tokens of a document or of a piece of one."""

    block: int
    row: int
    first: int  # number of earlier tokens of the document
    last: bool  # whether the document ends with it
    ids: Ids


@dataclass(frozen=True)
class RowSettings:
    """Settings that decide how rows are made."""

    length: int  # tokens per row, S
    packing: str  # "concat" or "best-fit"
    isolate: bool  # True to record document boundaries, so that attention stays within a document
    end: int | None  # the end token; None for none


class RowStream:
    """The rows of one stream of one source, from ``cursor`` on.

    ``documents`` returns those from (block, row) on, without null and empty ones and validation text. ``cut`` divides a
    text into pieces of at least so many characters; their tokens, joined, are those of the text.
    """

    def __init__(
        self,
        settings: RowSettings,
        documents: Callable[[int, int], Iterator[StreamDocument]],
        cursor: StreamCursor,
        cut: Callable[[str, int], Iterator[str]],
    ) -> None:
        self._settings, self._cut = settings, cut
        self.cursor = cursor  # position of the next row
        self._pieces = self._pieces_of(documents(cursor.block, cursor.row))
        self._ready: deque[_TokenizedPiece] = deque()
        # The document is read again from its beginning.
        self._buffered_tokens = -cursor.offset  # unused tokens in the buffer; concat only
        self._untokenized: deque[_UntokenizedPiece] = deque()
        self._tokenized_before = 0  # tokens so far of the document that is being tokenized
        self._group: tuple[BestFitPlan, list[_TokenizedPiece]] | None = None

    def missing_tokens(self, rows: int) -> int:
        """Return how many more tokens ``rows`` rows need; with best-fit perhaps not all yet."""
        length = self._settings.length
        if self._settings.packing == "concat":
            # The last label is the first token of the following row.
            return max(rows * length + 1 - self._buffered_tokens, 0)
        complete, rest = self._buffered_groups()
        if self._group is None:
            if not complete:
                return _GROUP * length - rest
            self._group = self._take_group()
            complete -= 1
        left = len(self._group[0].rows) - 1 - self.cursor.offset
        missing = -(-max(rows - left, 0) // _GROUP) - complete  # a group makes _GROUP rows at least
        return max(missing * _GROUP * length - rest, 0)

    def _buffered_groups(self) -> tuple[int, int]:
        """Return how many groups the buffered documents fill, and the tokens left over."""
        complete = rest = 0
        for piece in self._ready:
            rest += len(piece.ids)
            if rest >= _GROUP * self._settings.length:
                complete, rest = complete + 1, 0
        return complete, rest

    def next_pieces(self, tokens: float, characters: float) -> list[Content]:
        """Return contents of about ``tokens`` tokens; ``add_tokens`` must follow."""
        while tokens > 0:
            piece = next(self._pieces)
            self._untokenized.append(piece)
            # An estimate: the caller asks again.
            tokens -= len(piece.content) / (characters if isinstance(piece.content, str) else 1)
        return [piece.content for piece in self._untokenized]

    def _pieces_of(self, documents: Iterator[StreamDocument]) -> Iterator[_UntokenizedPiece]:
        """Yield the pieces to tokenize: parts of texts with concat, complete documents otherwise."""
        for block, row, content in documents:
            if self._settings.packing == "concat" and isinstance(content, str):
                pieces = self._cut(content, _PIECE)
                piece = next(pieces)
                for after in pieces:  # one piece late, because only the last one is marked as the end of its document
                    yield _UntokenizedPiece(block, row, False, piece)
                    piece = after
                yield _UntokenizedPiece(block, row, True, piece)
            else:
                yield _UntokenizedPiece(block, row, True, content)

    def add_tokens(self, tokens: list[Ids]) -> None:
        """Add the tokens of what ``next_pieces`` returned, in order."""
        end = [] if self._settings.end is None else [np.array([self._settings.end], dtype=np.uint32)]
        for ids in tokens:
            block, row, last, _ = self._untokenized.popleft()
            piece_ids = np.concatenate([ids, *end]) if last and end else ids
            if len(piece_ids) or (last and self._tokenized_before):  # a document without tokens is skipped
                self._ready.append(_TokenizedPiece(block, row, self._tokenized_before, last, piece_ids))
                self._buffered_tokens += len(piece_ids)
            self._tokenized_before = 0 if last else self._tokenized_before + len(piece_ids)
        assert not self._untokenized, "every piece has its tokens"

    def next_row(self) -> list[RowSegment]:
        """Return the segments of the next row; ``missing_tokens(1)`` must be 0."""
        return self._concat_row() if self._settings.packing == "concat" else self._best_fit_row()

    # --- concat ------------------------------------------------------------------------------------------------------

    def _concat_row(self) -> list[RowSegment]:
        length, needed, pieces = self._settings.length, self._settings.length + 1, []
        document_starts, offset = [], self.cursor.offset
        while True:
            block, row, first, last, ids = self._ready[0]
            piece = ids[offset - first : offset - first + needed]
            pieces.append(piece)
            needed -= len(piece)
            offset += len(piece)
            if not needed:  # the last token is only a label: the next row begins with it
                self.cursor = StreamCursor(block, row, offset - 1)
                break
            self._ready.popleft()
            if last:
                offset = 0
                document_starts.append(length + 1 - needed)
        self._buffered_tokens -= length
        tokens = np.concatenate(pieces)
        starts = np.array(document_starts, dtype=np.int64) if self._settings.isolate else _NO_POSITIONS
        return [RowSegment(tokens, length, False, starts)]

    # --- best-fit ----------------------------------------------------------------------------------------------------

    def _best_fit_row(self) -> list[RowSegment]:
        assert self._group is not None, "missing_tokens(1) has returned 0"
        plan, documents = self._group
        number = self.cursor.offset
        segments = []
        for index in range(*plan.rows[number : number + 2]):
            ids, offset = documents[plan.documents[index]].ids, plan.offsets[index]
            length = int(plan.lengths[index])
            tokens = ids[offset : offset + length + 1]  # with the next token, if the document continues
            segments.append(RowSegment(tokens, length, offset == 0, _NO_POSITIONS))
        if number + 2 < len(plan.rows):
            self.cursor = self.cursor._replace(offset=number + 1)
        else:
            self.cursor = StreamCursor(documents[-1].block, documents[-1].row + 1)
            self._group = self._take_group() if self._buffered_groups()[0] else None
        return segments

    def _take_group(self) -> tuple[BestFitPlan, list[_TokenizedPiece]]:
        """Remove the next documents that fill a group from the buffer, and pack them."""
        documents, tokens = [], 0
        while tokens < _GROUP * self._settings.length:
            documents.append(self._ready.popleft())
            tokens += len(documents[-1].ids)
        return fit_documents([len(document.ids) for document in documents], self._settings.length), documents
