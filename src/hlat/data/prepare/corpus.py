"""The corpus as a stream of rows, its division into work units, and the passes over it before tokenization.

    files --read from a position--> rows --until enough text--> WorkUnit

    documents --characters of each file--> start of each validation tail    (only for data.validation.by=tail)
    documents --sample--> tokenizer                                         (unless the recipe gives one)

The documents of unit n depend only on the corpus and the selected files, so a restart finds the same units again and
reads only the unfinished ones.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from hlat.config import DataConfig
from hlat.data.documents import (
    ALL_VALIDATION,
    SPLITS,
    BadRow,
    Content,
    Split,
    SplitRule,
    Vocabulary,
    content_bytes,
    hash_threshold,
    tail_start,
)
from hlat.data.formats.rows import RowError
from hlat.data.prepare.work_units import CorpusPosition, UnitIndex, UnitSpan, WorkUnit
from hlat.data.prepared.bad_rows import BadRowCounter
from hlat.data.source_file import SourceFile, read_beginnings
from hlat.data.stores.fetching import prefetch_in_order
from hlat.data.stores.local_files import checksum_matches, with_checksum
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.load import describe_tokenizer, load_saved, load_tokenizer
from hlat.data.tokenizers.training import sample_texts, train_bpe, train_char
from hlat.runtime.errors import DataError, StorageError
from hlat.runtime.storage.local_files import write_atomic

_UNIT_ROWS = 1 << 18  # upper bound: rows without text add no bytes to a unit, and every bad row is listed in its index


class CorpusRow(NamedTuple):
    """One row of a file, with its place in the corpus."""

    file: int  # index of the file in the corpus
    row: int  # index of the row in the file
    content: Content | None  # text or token ids; None for a null or unreadable row
    position: int  # bytes of all selected files up to and including this row
    error: RowError | None  # why the row cannot be read; None if it can

    def unreadable(self, rows: int) -> list[BadRow]:
        """Return a list with this row if it is bad, else an empty one; ``rows`` were read so far."""
        if self.error is None:
            return []
        return [BadRow(self.file, self.row, self.error.line, rows, self.error.reason, self.error.remedy)]


@dataclass(frozen=True)
class Corpus:
    """The files of a corpus, and the range of them to read."""

    files: list[SourceFile]
    file_range: range  # indexes of the files to read: all of them, or those of one partition
    unreadable_rows: float  # the largest fraction of rows that may be unreadable
    vocabulary: Vocabulary | None = None  # vocabulary of the given tokenizer; None if the tokenizer is trained

    @property
    def bytes(self) -> int:
        """Size in bytes of the files to read."""
        return sum(self.files[index].size for index in self.file_range)

    @property
    def with_all_files(self) -> "Corpus":
        return replace(self, file_range=range(len(self.files)))

    def new_bad_row_counter(self) -> BadRowCounter:
        return BadRowCounter(self.unreadable_rows, self.files)


@dataclass(frozen=True)
class SplitPlan:
    """Parameters of the training/validation split."""

    fraction: float  # fraction of the documents that is validation text, chosen by hash; 0 for none
    # For each source, the character (or token) at which its validation tail begins; None if not split by tail.
    tails: dict[int, int] | None = None
    # For each source, its characters (or tokens) before the selected files; only used with tails.
    characters_before: dict[int, int] = field(default_factory=dict)

    def split_rule(self, file: SourceFile, characters_before: int) -> SplitRule:
        """Return the rule for a file's documents, which follow so many characters of its source."""
        if file.is_validation:
            return ALL_VALIDATION
        if self.tails is not None:
            return SplitRule(boundary=max(self.tails[file.source] - characters_before, 0))
        return SplitRule(below=hash_threshold(self.fraction))


def read_rows(corpus: Corpus, start: CorpusPosition) -> Iterator[CorpusRow]:
    """Yield the rows of the selected files from a position on; DataError if one is unreadable or has changed."""
    before = sum(corpus.files[index].size for index in range(corpus.file_range.start, start.file))
    with closing(prefetch_in_order(corpus.files[start.file : corpus.file_range.stop])) as fetched:
        for index, (file, local) in enumerate(fetched, start.file):
            with file.as_input(local, corpus.vocabulary) as opened:
                for row in file.format.documents(opened, start.row if index == start.file else 0):
                    yield CorpusRow(index, row.row, row.content, before + row.position, row.error)
            file.check_unchanged()
            before += file.size  # positions are bytes on disk: of a compressed file, those of the compressed data


def read_with_progress(corpus: Corpus, progress: Callable[[int, int], None]) -> Iterator[CorpusRow]:
    """Yield all readable rows, and report progress; DataError if a file or too many rows cannot be read."""
    total, reported, bad_rows = corpus.bytes, 0, corpus.new_bad_row_counter()
    progress(0, total)
    for row in read_rows(corpus, CorpusPosition(corpus.file_range.start)):
        bad_rows.add(1, row.unreadable(1))
        if row.error is None:
            yield row
        if row.position - reported > total // 1000:  # a thousand reports at most, however many rows there are
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
    """Yield the units that are not finished, in order; DataError as ``read_with_progress``.

    ``finished`` returns the index of a unit by number, None if it is not finished. A unit ends with the document that
    reaches ``unit_bytes`` bytes of text or tokens, or with its source.
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
            # Reading goes on after the finished units: they are skipped without being read.
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
    """A unit under construction; ``file`` is its first file."""

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
            # Tokens of a source are contiguous in the shards, so no unit has documents of two.
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
        where = f"{self.file.path}, from row {self._from_row}"
        return WorkUnit(span, split_rule, self._documents, self.file.format.holds_tokens, where)


# Called with the stage (hash, measure, sample, tokenize, merge or verify), the bytes done, and the bytes in total. The
# stage "train tokenizer" counts merges. A total of 0 is one that is not known yet. Bytes are those of files, so a
# compressed file counts with its size on disk.
ProgressCallback = Callable[[str, int, int], None]

_CHARACTERS = "characters"
_ROWS = 8  # of a file in an object store, of which the tokens are compared with the text


def plan_split(config: DataConfig, corpus: Corpus, stored: Path, progress: ProgressCallback) -> SplitPlan:
    """Return the parameters of the split; with data.validation.by=tail, count the characters first.

    Tails are computed from all files, whichever are selected. Counts are kept in ``stored``, so that a restart need not
    count again.
    """
    validation = config.validation
    if validation.path is not None or validation.fraction == 0:
        return SplitPlan(0.0)
    if validation.by == "document":
        return SplitPlan(validation.fraction)
    characters_of = _counted_before(stored)
    if characters_of is None:
        characters_of = _characters_of_files(corpus.with_all_files, progress)
        write_atomic(stored, json.dumps(with_checksum({_CHARACTERS: characters_of})).encode())
    counts, before = defaultdict[int, int](int), dict[int, int]()
    for index, characters in enumerate(characters_of):
        if index == corpus.file_range.start:
            before = dict(counts)
        counts[corpus.files[index].source] += characters
    tails = {source: tail_start(count, validation.fraction) for source, count in counts.items()}
    return SplitPlan(0.0, tails, before)


def _counted_before(stored: Path) -> list[int] | None:
    """Read the counts of an interrupted run, by file; None if missing or damaged."""
    try:
        record = json.loads(stored.read_bytes())
        return list(record[_CHARACTERS]) if checksum_matches(record) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def vocabulary_of_given_tokenizer(config: DataConfig) -> Vocabulary | None:
    """Return the vocabulary of the recipe's tokenizer; None if it is to be trained."""
    settings = config.tokenizer
    return (
        None if settings.path is None else Vocabulary.from_tokenizer(load_tokenizer(settings.path, settings.eos_token))
    )


def _characters_of_files(corpus: Corpus, progress: ProgressCallback) -> list[int]:
    counts = [0] * len(corpus.files)
    for document in read_with_progress(corpus, partial(progress, "measure")):
        counts[document.file] += 0 if document.content is None else len(document.content)
    return counts


def make_tokenizer(
    config: DataConfig, corpus: Corpus, plan: SplitPlan, folder: Path, progress: ProgressCallback
) -> tuple[Tokenizer, list[str]]:
    """Load the tokenizer, or train it on the training text, and save it; return it, and notes for the user.

    A tokenizer that an interrupted run has already saved in ``folder`` is reused. DataError if it cannot be read or
    trained.
    """
    settings = config.tokenizer
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.making")
        shutil.rmtree(unfinished, ignore_errors=True)
        given = None if settings.path is None else load_tokenizer(settings.path, settings.eos_token)
        (given or _train_tokenizer(config, corpus, plan, progress)).save(unfinished)
        unfinished.rename(folder)  # so a folder under its final name is complete
    tokenizer = load_saved(folder)
    if settings.path is not None:
        said = describe_tokenizer(load_tokenizer(settings.path, settings.eos_token), _some_texts(corpus))
        return tokenizer, [] if said is None else [" ".join(said).rstrip()]
    if settings.train == "bpe" and tokenizer.vocab_size < settings.vocab_size:
        return tokenizer, [
            f"The corpus is too small for data.tokenizer.vocab_size = {settings.vocab_size}: "
            f"the tokenizer has {tokenizer.vocab_size} tokens."
        ]
    return tokenizer, []


def _some_texts(corpus: Corpus) -> list[str]:
    texts, first = read_beginnings(corpus.files), corpus.file_range[:1]
    # Files of an object store are fetched for this only if nothing is local: one of them.
    if texts or not first or corpus.files[first[0]].format.holds_tokens:
        return texts
    with suppress(DataError, StorageError):  # whoever prepares the file reports it
        rows = read_with_progress(replace(corpus, file_range=first), lambda done, total: None)
        texts = [row.content for row in islice(rows, _ROWS) if isinstance(row.content, str)]
    return texts


def _train_tokenizer(config: DataConfig, corpus: Corpus, plan: SplitPlan, progress: ProgressCallback) -> Tokenizer:
    settings = config.tokenizer
    counts: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    texts = _counted(read_texts(corpus, plan, partial(progress, "sample")), counts)
    if settings.train == "char":
        alphabet: set[str] = set()
        for _, text in texts:
            alphabet.update(text)
        refuse_empty_split(config, corpus, counts)
        return train_char(alphabet, settings.eos_token)
    trained_on = (text for split, text in texts if split == "train")
    sampled = sample_texts(trained_on, settings.train_bytes, distinct=config.duplicates == "drop")
    refuse_empty_split(config, corpus, counts)
    return train_bpe(sampled, settings.vocab_size, settings.eos_token, progress)


def _counted(texts: Iterator[tuple[Split, str]], counts: dict[Split, int]) -> Iterator[tuple[Split, str]]:
    for split, text in texts:
        counts[split] += 1
        yield split, text


def refuse_empty_split(config: DataConfig, corpus: Corpus, counts: dict[Split, int], undo: str = "") -> None:
    """Raise DataError if a split that the recipe wants has no text; ``undo`` ends the message."""
    if counts["train"] == 0:
        others = f" and {len(corpus.files) - 1} more" if len(corpus.files) > 1 else ""
        raise DataError(f"{corpus.files[0].path}{others}: no text for training: {_WHY_NO_TEXT}")
    validation = config.validation
    if counts["validation"] > 0 or (validation.path is None and validation.fraction == 0):
        return
    if validation.path is not None:
        duplicate = " or a duplicate of one in the corpus" if config.duplicates == "drop" else ""
        raise DataError(f"data.validation.path {validation.path}: every document in it is null or empty{duplicate}.")
    tail = "" if validation.by == "tail" else "data.validation.by=tail, which cuts inside a document, "
    raise DataError(
        f"data.validation: none of the {counts['train']} documents was assigned to the validation split. Use {tail}"
        f"a larger data.validation.fraction, or data.validation.fraction=0 for no validation{undo}."
    )


_WHY_NO_TEXT = (
    "every document is null, empty, or validation text. Check data.path and data.text_column; a corpus of few "
    "documents needs data.validation.by=tail."
)
