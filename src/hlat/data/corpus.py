"""The corpus as a stream of documents, from any place in it, and cut into units of work.

    files --read from a cursor--> documents --as many as fill a unit--> Unit

Which documents form unit n depends on the corpus alone, so a restart finds the same units again and reads only those
that are not finished.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from hlat.data.ahead import in_turn
from hlat.data.readers import read_documents
from hlat.data.sources import SourceFile
from hlat.data.split import ALL_VALIDATION, Assignment, Split, hash_threshold
from hlat.data.units import Cursor, Span, Unit, UnitIndex
from hlat.runtime import DataError


class Document(NamedTuple):
    """One row of one file; ``position`` counts the bytes of all files up to it."""

    file: int
    row: int
    text: str | None
    position: int


@dataclass(frozen=True)
class SplitPlan:
    """How the corpus is split.

    Attributes:
        fraction: share of the documents that is validation text, chosen by hash; 0 for none.
        tails: for each source, the character at which its validation tail begins; None if not split by tail.
    """

    fraction: float
    tails: dict[int, int] | None

    def assignment(self, file: SourceFile, characters_before: int) -> Assignment:
        """How documents of a file are split, of whose source so many characters came before."""
        if file.is_validation:
            return ALL_VALIDATION
        if self.tails is not None:
            return Assignment(boundary=max(self.tails[file.source] - characters_before, 0))
        return Assignment(below=hash_threshold(self.fraction))


def stream(files: list[SourceFile], start: Cursor) -> Iterator[Document]:
    """The documents of all files from a cursor on, in order; null texts as None.

    Raises:
        DataError: a file that cannot be read as it should, or that changed since it was fingerprinted.
    """
    before = sum(file.size for file in files[: start.file])
    with closing(in_turn(files[start.file :])) as arriving:
        for index, (file, local) in enumerate(arriving, start.file):
            with file.named(local):
                for row in read_documents(local, file.column, start.row if index == start.file else 0):
                    yield Document(index, row.row, row.text, before + row.position)
            file.check_unchanged()
            before += file.size


def watched(files: list[SourceFile], progress: Callable[[int, int], None]) -> Iterator[Document]:
    """All documents, with a report of the bytes done at every thousandth of the corpus."""
    total = sum(file.size for file in files)
    reported = 0
    for document in stream(files, Cursor()):
        yield document
        if document.position - reported > total // 1000:
            reported = document.position
            progress(reported, total)
    progress(total, total)


def texts_of(
    files: list[SourceFile], plan: SplitPlan, progress: Callable[[int, int], None]
) -> Iterator[tuple[Split, str]]:
    """The texts of the corpus, without null and empty ones, and the split that each goes to."""
    characters: dict[int, int] = defaultdict(int)
    for document in watched(files, progress):
        file = files[document.file]
        if document.text:
            assignment = plan.assignment(file, characters[file.source])
            encoded = encode(document.text, file, document.row)
            yield from assignment.pieces(document.text, encoded, 0)
            characters[file.source] += len(document.text)


def units(
    files: list[SourceFile], plan: SplitPlan, unit_bytes: int, finished: Callable[[int], UnitIndex | None]
) -> Iterator[Unit]:
    """The units that are not finished, in order.

    Args:
        files: the corpus.
        plan: how it is split.
        unit_bytes: a unit ends with the document that reaches so many bytes of text, or with its source.
        finished: the index of a unit, None if it has to be made.
    """
    cursor, last, number = Cursor(), False, 0
    characters: dict[int, int] = defaultdict(int)
    documents: _Peekable | None = None
    while not last:
        index = finished(number)
        if index is None:
            documents = documents or _Peekable(stream(files, cursor))
            unit = _take(number, cursor, documents, files, plan, unit_bytes, characters)
            yield unit
            span = unit.span
        else:
            documents, span = None, index.span
        cursor, last = span.next, span.last
        characters[span.source] += span.characters
        number += 1


class _Peekable:
    """Documents, with a look at the next one."""

    def __init__(self, documents: Iterator[Document]) -> None:
        self._documents = documents
        self._head: Document | None = next(documents, None)

    def peek(self) -> Document | None:
        return self._head

    def take(self) -> Document:
        assert self._head is not None
        head, self._head = self._head, next(self._documents, None)
        return head


def _take(
    number: int,
    cursor: Cursor,
    documents: _Peekable,
    files: list[SourceFile],
    plan: SplitPlan,
    unit_bytes: int,
    characters_before: dict[int, int],
) -> Unit:
    texts: list[bytes] = []
    size = characters = nulls = empty = position = 0
    first = documents.peek()
    file = files[first.file if first else cursor.file]
    following = cursor
    while size < unit_bytes and (head := documents.peek()) and files[head.file].source == file.source:
        document = documents.take()
        following, position = Cursor(document.file, document.row + 1), document.position
        nulls += document.text is None
        empty += document.text == ""
        if document.text:
            encoded = encode(document.text, files[document.file], document.row)
            texts.append(encoded)
            size += len(encoded)
            characters += len(document.text)
    last = documents.peek() is None
    span = Span(number, following, last, file.source, characters, nulls, empty, position)
    where = f"{file.path}, from row {first.row if first else 0}"
    return Unit(span, plan.assignment(file, characters_before[file.source]), texts, where)


def encode(text: str, file: SourceFile, row: int) -> bytes:
    """The text in UTF-8; JSON can spell half of a surrogate pair, which is no text."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{file.path}, row {row}: character {error.start} is half of a surrogate pair "
            f"(U+{ord(text[error.start]):04X}), which is not text. Repair or remove the row."
        ) from error
