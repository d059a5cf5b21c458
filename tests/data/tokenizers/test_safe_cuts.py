"""A document that is tokenized piece by piece gives the rows that it gives as a whole."""

from collections.abc import Iterator
from itertools import count

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hlat.data.online.streams import RowSettings, RowStream, StreamCursor, StreamDocument

_END = 0


def _ids(text: str) -> np.ndarray:
    """Two tokens a character, but none for a space: pieces may be without a token, and so may documents."""
    return np.array([number for char in text if char != " " for number in (1, ord(char))], dtype=np.uint32)


def _rows(stream: RowStream, number: int) -> Iterator[tuple[list[int], list[int], StreamCursor]]:
    """Tokens, beginnings of documents, and where the stream is before the row."""
    for _ in range(number):
        while lacking := stream.missing_tokens(1):
            stream.add_tokens([_ids(str(text)) for text in stream.next_pieces(lacking, 0.5)])
        cursor = stream.cursor
        (part,) = stream.next_row()
        yield part.tokens.tolist(), part.document_starts.tolist(), cursor


@given(
    texts=st.lists(st.text(" abc", min_size=1, max_size=12), min_size=1, max_size=6).filter(
        lambda texts: any(text.strip() for text in texts)
    ),
    length=st.integers(1, 9),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    end=st.sampled_from([None, _END]),
    rows=st.integers(1, 12),
)
def test_pieces_change_nothing_from_any_row_on(
    texts: list[str], length: int, sizes: tuple[int, int], end: int | None, rows: int
) -> None:
    """The expected rows are cut from all documents joined; a stream begun at any row's cursor goes on with them."""
    sizes_of = iter(sizes * 1000)
    settings = RowSettings(length, "concat", isolate=True, end=end)

    def documents(turn: int, row: int) -> Iterator[StreamDocument]:
        for now in count(turn):
            yield from (
                StreamDocument(now, place, texts[place]) for place in range(row if now == turn else 0, len(texts))
            )

    def cut(text: str, at_least: int) -> Iterator[str]:
        while text:
            size = next(sizes_of)
            yield text[:size]
            text = text[size:]

    found = list(_rows(RowStream(settings, documents, StreamCursor(), cut), rows))
    joined: list[int] = []
    begins: set[int] = set()
    for document in documents(0, 0):
        ids = _ids(str(document.content)).tolist() + ([] if end is None else [end])
        if ids:
            begins.add(len(joined))
            joined += ids
        if len(joined) > rows * length:
            break
    for number, (tokens, starts, cursor) in enumerate(found):
        first = number * length
        assert tokens == joined[first : first + length + 1]
        assert starts == [place - first for place in sorted(begins) if first < place <= first + length]
        again = RowStream(settings, documents, cursor, cut)
        assert [row[:2] for row in _rows(again, rows - number)] == [row[:2] for row in found[number:]]
