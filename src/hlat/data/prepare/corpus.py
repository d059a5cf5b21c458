"""The corpus as a stream of rows, readable from any position, and its division into work units.

    files --read from a position--> rows --until enough text--> WorkUnit

The documents of unit n depend only on the corpus and the selected files, so a restart finds the same units again and
reads only the unfinished ones.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hlat.data.formats.document import Content, Vocabulary, content_bytes
from hlat.data.formats.records import RowError
from hlat.data.manifest.bad_row import BadRow
from hlat.data.manifest.bad_rows import BadRowCounter
from hlat.data.prepare.work_units import CorpusPosition, UnitIndex, UnitSpan, WorkUnit
from hlat.data.sources.source_file import SourceFile
from hlat.data.sources.split import ALL_VALIDATION, Split, SplitRule, hash_threshold
from hlat.data.stores.prefetch import prefetch_in_order

_UNIT_ROWS = 1 << 18  # upper bound: rows without text add no bytes to a unit, and every bad row is listed in its index


class CorpusRow(NamedTuple):
    """One row of a file.

    Attributes:
        file: index of the file in the corpus.
        row: index of the row in the file.
        content: text or token ids; None for a null or unreadable row.
        position: bytes of all selected files up to and including this row.
        error: why the row cannot be read; None if it can.
    """

    file: int
    row: int
    content: Content | None
    position: int
    error: RowError | None

    def unreadable(self, rows: int) -> list[BadRow]:
        """Return a list with this row if it cannot be read, else an empty list.

        Args:
            rows: rows read so far, this one included.
        """
        if self.error is None:
            return []
        return [BadRow(self.file, self.row, self.error.line, rows, self.error.reason, self.error.remedy)]


@dataclass(frozen=True)
class Corpus:
    """The files of a corpus, and the range of them to read.

    Attributes:
        files: all files.
        file_range: indexes of the files to read: all of them, or those of one partition.
        unreadable_rows: the largest fraction of rows that may be unreadable.
        vocabulary: vocabulary of the given tokenizer; None if the tokenizer is trained.
    """

    files: list[SourceFile]
    file_range: range
    unreadable_rows: float
    vocabulary: Vocabulary | None = None

    @property
    def bytes(self) -> int:
        """Total size of the files to read."""
        return sum(self.files[index].size for index in self.file_range)

    @property
    def with_all_files(self) -> "Corpus":
        """The same corpus with all files selected."""
        return replace(self, file_range=range(len(self.files)))

    def new_bad_row_counter(self) -> BadRowCounter:
        """Return a new counter of bad rows."""
        return BadRowCounter(self.unreadable_rows, self.files)


@dataclass(frozen=True)
class SplitPlan:
    """Parameters of the training/validation split.

    Attributes:
        fraction: fraction of the documents that is validation text, chosen by hash; 0 for none.
        tails: for each source, the character (or token) at which its validation tail begins; None if not split by tail.
        characters_before: for each source, its characters (or tokens) before the selected files; only used with tails.
    """

    fraction: float
    tails: dict[int, int] | None = None
    characters_before: dict[int, int] = field(default_factory=dict)

    def split_rule(self, file: SourceFile, characters_before: int) -> SplitRule:
        """Return the rule that splits the documents of a file.

        Args:
            file: the file.
            characters_before: characters (or tokens) of the file's source that precede these documents.
        """
        if file.is_validation:
            return ALL_VALIDATION
        if self.tails is not None:
            return SplitRule(boundary=max(self.tails[file.source] - characters_before, 0))
        return SplitRule(below=hash_threshold(self.fraction))


def read_rows(corpus: Corpus, start: CorpusPosition) -> Iterator[CorpusRow]:
    """Yield the rows of the selected files from a position on, in order.

    Raises:
        DataError: a file cannot be read, or has changed since it was hashed.
    """
    before = sum(corpus.files[index].size for index in range(corpus.file_range.start, start.file))
    with closing(prefetch_in_order(corpus.files[start.file : corpus.file_range.stop])) as fetched:
        for index, (file, local) in enumerate(fetched, start.file):
            with file.as_input(local, corpus.vocabulary) as opened:
                for row in file.format.documents(opened, start.row if index == start.file else 0):
                    yield CorpusRow(index, row.row, row.content, before + row.position, row.error)
            file.check_unchanged()
            before += file.size


def read_with_progress(corpus: Corpus, progress: Callable[[int, int], None]) -> Iterator[CorpusRow]:
    """Yield all readable rows, and report the bytes done at every thousandth of the corpus.

    Raises:
        DataError: as ``read_rows``; or too many rows cannot be read.
    """
    total, reported, bad_rows = corpus.bytes, 0, corpus.new_bad_row_counter()
    progress(0, total)
    for row in read_rows(corpus, CorpusPosition(corpus.file_range.start)):
        bad_rows.add(1, row.unreadable(1))
        if row.error is None:
            yield row
        if row.position - reported > total // 1000:
            reported = row.position
            progress(reported, total)
    bad_rows.finish()
    progress(total, total)


def read_texts(corpus: Corpus, plan: SplitPlan, progress: Callable[[int, int], None]) -> Iterator[tuple[Split, str]]:
    """Yield (split, text) for a corpus of text, without null, empty and unreadable rows."""
    characters: dict[int, int] = defaultdict(int)
    for row in read_with_progress(corpus, progress):
        file = corpus.files[row.file]
        if text := row.content:
            assert isinstance(text, str), "a tokenizer is never trained on documents that are tokens"
            split_rule = plan.split_rule(file, characters[file.source])
            yield from split_rule.split_document(text, text.encode(), 0)
            characters[file.source] += len(text)


def unfinished_units(
    corpus: Corpus, plan: SplitPlan, unit_bytes: int, finished: Callable[[int], UnitIndex | None]
) -> Iterator[WorkUnit]:
    """Yield the units that are not finished, in order; none if no files are selected.

    Args:
        corpus: the corpus to divide.
        plan: parameters of the split.
        unit_bytes: a unit ends with the document that reaches this many bytes of text or tokens, or with its source.
        finished: returns the index of a unit by number, or None if the unit is not finished.

    Raises:
        DataError: as ``read_rows``; or too many rows cannot be read.
    """
    position, last, number = CorpusPosition(corpus.file_range.start), not corpus.file_range, 0
    characters: dict[int, int] = defaultdict(int, plan.characters_before)
    rows: _Peekable | None = None
    bad_rows = corpus.new_bad_row_counter()
    while not last:
        index = finished(number)
        if index is None:
            rows = rows or _Peekable(read_rows(corpus, position))
            builder = _UnitBuilder(corpus.files, rows.head.file if rows.head else position.file)
            builder.fill(rows, bad_rows, unit_bytes)
            span = builder.span(number, rows.head is None)
            yield builder.unit(span, plan.split_rule(builder.file, characters[span.source]))
        else:
            rows, span = None, index.span
            bad_rows.add(span.rows, span.unreadable)
        position, last = span.next, span.last
        characters[span.source] += span.characters
        number += 1
    if len(corpus.file_range) == len(corpus.files):
        bad_rows.finish()  # for a partition, bad rows are checked when all partitions are merged


class _Peekable:
    """An iterator with one item of look-ahead; ``head`` is the next row, None at the end."""

    def __init__(self, rows: Iterator[CorpusRow]) -> None:
        self._rows = rows
        self.head: CorpusRow | None = next(rows, None)

    def take(self) -> CorpusRow:
        assert self.head is not None
        head, self.head = self.head, next(self._rows, None)
        return head


class _UnitBuilder:
    """A unit under construction.

    Attributes:
        file: its first file.
    """

    def __init__(self, files: list[SourceFile], first: int) -> None:
        self._files, self.file = files, files[first]
        self._next = CorpusPosition(first)
        self._from_row = 0
        self._documents: list[bytes] = []
        self._unreadable: list[BadRow] = []
        self._bytes = self._characters = self._rows = self._nulls = self._empty = self._position = 0

    def fill(self, rows: _Peekable, bad_rows: BadRowCounter, unit_bytes: int) -> None:
        """Take rows of one source until there is enough text."""
        self._from_row = rows.head.row if rows.head else 0
        while (
            self._bytes < unit_bytes
            and self._rows < _UNIT_ROWS
            and rows.head is not None
            and self._files[rows.head.file].source == self.file.source
        ):
            row = rows.take()
            bad_rows.add(1, row.unreadable(1))
            self._add(row)

    def _add(self, row: CorpusRow) -> None:
        self._next, self._position = CorpusPosition(row.file, row.row + 1), row.position
        self._rows += 1
        self._unreadable += row.unreadable(self._rows)
        if row.content is not None and len(row.content):
            self._documents.append(content_bytes(row.content))
            self._bytes += len(self._documents[-1])
            self._characters += len(row.content)
        elif row.error is None:
            self._nulls += row.content is None
            self._empty += row.content is not None

    def span(self, number: int, last: bool) -> UnitSpan:
        """Return the description of the rows taken."""
        return UnitSpan(
            number=number,
            next=self._next,
            last=last,
            source=self.file.source,
            characters=self._characters,
            rows=self._rows,
            null_rows=self._nulls,
            empty_documents=self._empty,
            unreadable=self._unreadable,
            position=self._position,
        )

    def unit(self, span: UnitSpan, split_rule: SplitRule) -> WorkUnit:
        """Return the unit, ready to be tokenized."""
        where = f"{self.file.path}, from row {self._from_row}"
        return WorkUnit(span, split_rule, self._documents, self.file.format.holds_tokens, where)
