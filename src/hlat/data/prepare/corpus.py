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
from hlat.data.stores.local_files import checksum_matches, with_checksum, write_atomic
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.load import describe_tokenizer, load_saved, load_tokenizer
from hlat.data.tokenizers.training import sample_texts, train_bpe, train_char
from hlat.runtime.errors import DataError, StorageError

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


ProgressCallback = Callable[[str, int, int], None]
"""Called with the stage (hash, measure, sample, tokenize, merge or verify), the bytes done, and the bytes in total.

The stage "train tokenizer" counts merges. A total of 0 is one that is not known yet. Bytes are those of files, so a
compressed file counts with its size on disk.
"""

_CHARACTERS = "characters"
_ROWS = 8  # of a file in an object store, of which the tokens are compared with the text


def plan_split(config: DataConfig, corpus: Corpus, stored: Path, progress: ProgressCallback) -> SplitPlan:
    """Return the parameters of the split; with data.validation.by=tail, count the characters of the corpus first.

    Args:
        config: the data section.
        corpus: the corpus; tails are computed from all its files, whichever of them are selected.
        stored: file that stores the counted characters, so that a restart need not count again.
        progress: called with progress reports, see ProgressCallback.
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
    """Read the characters of each file that an interrupted run counted; None if missing or damaged."""
    try:
        record = json.loads(stored.read_bytes())
        return list(record[_CHARACTERS]) if checksum_matches(record) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def vocabulary_of_given_tokenizer(config: DataConfig) -> Vocabulary | None:
    """Return the vocabulary of the tokenizer that the recipe gives; None if the tokenizer is to be trained.

    Raises:
        DataError: the tokenizer cannot be read.
    """
    settings = config.tokenizer
    return (
        None if settings.path is None else Vocabulary.from_tokenizer(load_tokenizer(settings.path, settings.eos_token))
    )


def _characters_of_files(corpus: Corpus, progress: ProgressCallback) -> list[int]:
    """Count the characters (or tokens) of every file."""
    counts = [0] * len(corpus.files)
    for document in read_with_progress(corpus, partial(progress, "measure")):
        counts[document.file] += 0 if document.content is None else len(document.content)
    return counts


def make_tokenizer(
    config: DataConfig, corpus: Corpus, plan: SplitPlan, folder: Path, progress: ProgressCallback
) -> tuple[Tokenizer, list[str]]:
    """Load or train the tokenizer and save it to a folder; return it, and notes for the user.

    A tokenizer that an interrupted run has already saved there is reused.

    Args:
        config: the data section.
        corpus: the corpus to train on.
        plan: parameters of the split; the tokenizer is not trained on validation text.
        folder: the folder to write; an unfinished copy may lie next to it.
        progress: called with progress reports, see ProgressCallback.

    Raises:
        DataError: the tokenizer cannot be read, or no tokenizer can be trained on the text.
    """
    settings = config.tokenizer
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.making")
        shutil.rmtree(unfinished, ignore_errors=True)
        given = None if settings.path is None else load_tokenizer(settings.path, settings.eos_token)
        (given or _train_tokenizer(config, corpus, plan, progress)).save(unfinished)
        unfinished.rename(folder)
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
    """Return a little text of the corpus; of one in an object store, of its first file."""
    texts, first = read_beginnings(corpus.files), corpus.file_range[:1]
    if texts or not first or corpus.files[first[0]].format.holds_tokens:
        return texts
    with suppress(DataError, StorageError):  # whoever prepares the file reports it
        rows = read_with_progress(replace(corpus, file_range=first), lambda done, total: None)
        texts = [row.content for row in islice(rows, _ROWS) if isinstance(row.content, str)]
    return texts


def _train_tokenizer(config: DataConfig, corpus: Corpus, plan: SplitPlan, progress: ProgressCallback) -> Tokenizer:
    """Train a tokenizer as the recipe describes."""
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
    """Yield the texts, and count those of each split."""
    for split, text in texts:
        counts[split] += 1
        yield split, text


def refuse_empty_split(config: DataConfig, corpus: Corpus, counts: dict[Split, int], undo: str = "") -> None:
    """Raise DataError if a split that the recipe wants has no text.

    Args:
        config: the data section.
        corpus: the corpus that was read, for messages.
        counts: number of documents of each split.
        undo: the step required before preparing with other settings, appended to the message.
    """
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
