"""The corpus as a stream of rows, its division into work units, and the passes over it before tokenization.

    files --read from a position--> rows --until enough text--> WorkUnit

    documents --characters of each file--> start of each validation tail    (only for data.validation.by=tail)
    documents, until enough are chosen by hash--> sources of few documents, and their tails     (only for auto)
    documents --sample--> tokenizer                                         (unless the recipe gives one)

The documents of unit n depend only on the corpus and the selected files, so a restart finds the same units again and
reads only the unfinished ones.
"""

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from hlat.config import DataConfig
from hlat.data.documents import (
    ALL_VALIDATION,
    ENOUGH_DOCUMENTS,
    ENOUGH_TOKENS,
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
from hlat.data.prepared.consistency import TAILS
from hlat.data.source_file import SourceFile, prefetch_in_order, read_beginnings
from hlat.data.source_listing import more
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.load import describe_tokenizer, load_saved, load_tokenizer
from hlat.data.tokenizers.training import sample_texts, train_bpe, train_char
from hlat.runtime.errors import DataError, StorageError

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

    def new_bad_row_counter(self) -> BadRowCounter:
        return BadRowCounter(self.unreadable_rows, self.files)


@dataclass(frozen=True)
class SplitPlan:
    """Parameters of the training/validation split."""

    fraction: float  # fraction of the documents that is validation text, chosen by hash; 0 for none
    # Character (or token) at which the validation tail begins, for each source that is split by tail.
    tails: dict[int, int] = field(default_factory=dict)
    # For each source, its characters (or tokens) before the selected files; only used with tails.
    characters_before: dict[int, int] = field(default_factory=dict)

    def split_rule(self, file: SourceFile, characters_before: int) -> SplitRule:
        """Return the rule for a file's documents, which follow so many characters of its source."""
        if file.is_validation:
            return ALL_VALIDATION
        if (tail := self.tails.get(file.source)) is not None:
            return SplitRule(boundary=max(tail - characters_before, 0))
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


def read_texts(
    corpus: Corpus, plan: SplitPlan, progress: Callable[[int, int], None], counts: dict[Split, int]
) -> Iterator[tuple[Split, str]]:
    """Yield (split, text) for a corpus of text, without null, empty and unreadable rows; count the texts of each."""
    characters: dict[int, int] = defaultdict(int)
    for row in read_with_progress(corpus, progress):
        file = corpus.files[row.file]
        if text := row.content:
            assert isinstance(text, str), "a tokenizer is never trained on documents that are tokens"
            split_rule = plan.split_rule(file, characters[file.source])
            for split, piece in split_rule.split_document(text, text.encode(), 0):
                counts[split] += 1
                yield split, piece
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
            first = CorpusPosition(rows.head.file, rows.head.row) if rows.head else CorpusPosition(position.file)
            file = corpus.files[first.file]
            span = UnitSpan(number, first, source=file.source)
            documents = _take_documents(corpus, rows, span, bad_rows, unit_bytes)
            rule, where = plan.split_rule(file, characters[span.source]), f"{file.path}, from row {first.row}"
            yield WorkUnit(span, rule, documents, file.format.holds_tokens, where)
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
        self.advance()

    def advance(self) -> None:
        self.head = next(self._rows, None)


def _take_documents(
    corpus: Corpus, rows: _Peekable, span: UnitSpan, bad_rows: BadRowCounter, unit_bytes: int
) -> list[bytes]:
    """Take rows of the unit's source until there is enough text; count them in ``span``."""
    documents, size = list[bytes](), 0
    while (
        size < unit_bytes
        and span.rows < _UNIT_ROWS
        and (row := rows.head) is not None
        # Tokens of a source are contiguous in the shards, so no unit has documents of two.
        and corpus.files[row.file].source == span.source
    ):
        rows.advance()
        bad_rows.add(1, row.unreadable(1))
        span.next, span.position = CorpusPosition(row.file, row.row + 1), row.position
        span.rows += 1
        span.unreadable += row.unreadable(span.rows)
        if row.content is not None and len(row.content):
            documents.append(content_bytes(row.content))
            size += len(documents[-1])
            span.characters += len(row.content)
        elif row.error is None:
            span.null_rows += row.content is None
            span.empty_documents += row.content is not None
    span.last = rows.head is None
    return documents


# Called with the stage (hash, measure, sample, tokenize, merge or verify), the bytes done, and the bytes in total. The
# stage "train tokenizer" counts merges. A total of 0 is one that is not known yet. Bytes are those of files, so a
# compressed file counts with its size on disk.
ProgressCallback = Callable[[str, int, int], None]

_ROWS = 8  # of a file in an object store, of which the tokens are compared with the text


class SourceTail(NamedTuple):
    """The tail of a source, which is held out."""

    tail: int  # character (or token) at which the tail begins
    characters: dict[int, int]  # of each of its files, by index


SourceTails = dict[int, SourceTail]
"""Tails of the sources that are split so, by index: a pure function of corpus and recipe."""

_LOOKED_AT = 1 << 24  # bytes of a source after which the number of its documents is extrapolated
_SURELY_ENOUGH = 20  # documents that are expected to be chosen: fewer than a quarter of them are as good as impossible
_SHORTEST_TAIL = 16  # characters, of all sources: two tokens at least, so that one of them can be predicted


def short_sources(config: DataConfig, corpus: Corpus, most_bytes: int | None = None) -> SourceTails:
    """Find the sources of which hashes choose nearly nothing, or all, for validation; empty unless by auto.

    A source is read until enough is chosen: usually a hundredth of the corpus, or a few MB of it. With ``most_bytes``,
    a source for which more has to be read is left out. DataError if a file cannot be read.
    """
    validation = config.validation
    if validation.path is not None or not validation.fraction or validation.by != "auto" or config.mode == "online":
        return {}
    files_of = defaultdict[int, list[int]](list)
    for index, file in enumerate(corpus.files):
        if not file.is_validation:
            files_of[file.source].append(index)
    seen = set[bytes]()
    least = -(-_SHORTEST_TAIL // max(len(files_of), 1))
    found = {
        source: _tail_if_short(config, corpus, files, seen, least, most_bytes) for source, files in files_of.items()
    }
    return {source: short for source, short in found.items() if short is not None}


def tails_setting(short: SourceTails) -> dict[str, list[int]]:
    """Return the setting that records the sources, for manifests and keys; without any, none."""
    return {TAILS: sorted(short)} if short else {}


def bytes_per_token(config: DataConfig) -> float:
    """Estimate the bytes of text in a token; a token that is stored as such has 4."""
    return 1.0 if config.tokenizer.path is None and config.tokenizer.train == "char" else 4.0


def _tail_if_short(
    config: DataConfig, corpus: Corpus, files: list[int], seen: set[bytes], least: int, most_bytes: int | None
) -> SourceTail | None:
    fraction, enough = config.validation.fraction, ENOUGH_TOKENS * bytes_per_token(config)
    rule, size = SplitRule(hash_threshold(fraction)), sum(corpus.files[index].size for index in files)
    documents, characters = list[tuple[int, int]](), dict.fromkeys(files, 0)  # start and length; copies only if kept
    offset = before = text = held = held_text = 0
    for index in files:
        # One by one: files of a store are fetched, and of most sources the first is enough.
        for row in read_rows(replace(corpus, file_range=range(index, index + 1)), CorpusPosition(index)):
            if row.content is None or not (length := len(row.content)):
                continue
            encoded, start = content_bytes(row.content), offset
            offset, characters[index] = offset + length, characters[index] + length
            if config.duplicates == "drop":
                if (digest := blake2b(encoded, digest_size=16).digest()) in seen:
                    continue
                seen.add(digest)
            documents.append((start, length))
            text += len(encoded)
            if rule.split_of(encoded) == "validation":
                held, held_text = held + 1, held_text + len(encoded)
            # Something must be left for training.
            if (held >= ENOUGH_DOCUMENTS or held_text >= enough) and held < len(documents):
                return None
            read = before + row.position
            if read >= _LOOKED_AT and len(documents) * (size / read) * fraction >= _SURELY_ENOUGH:
                return None
            if most_bytes is not None and max(read, text) > most_bytes:
                return None
        before += corpus.files[index].size
    # So small a source that its share is little text: whole documents of about that share are as good as a tail.
    if 0 < held < len(documents) and held_text >= fraction * text / 2:
        return None
    boundary = _tail_of(documents, fraction, least)
    return None if boundary is None else SourceTail(boundary, characters)


def _tail_of(documents: list[tuple[int, int]], fraction: float, least: int) -> int | None:
    """Return where the last share of documents, given by start and length, begins; None for fewer than 2 characters."""
    total = sum(length for _, length in documents)
    left = max(total - tail_start(total, fraction), min(least, total // 2))
    for start, length in reversed(documents if total > 1 else []):
        if left <= length:
            return start + length - left
        left -= length
    return None


def plan_split(config: DataConfig, corpus: Corpus, short: SourceTails, progress: ProgressCallback) -> SplitPlan:
    """Return the parameters of the split; with data.validation.by=tail, count the characters first."""
    validation, first = config.validation, corpus.file_range.start
    if validation.path is not None or validation.fraction == 0:
        return SplitPlan(0.0)
    tails = _all_tails(corpus, validation.fraction, progress) if validation.by == "tail" else short
    before = {source: sum(n for i, n in each.characters.items() if i < first) for source, each in tails.items()}
    fraction = 0.0 if validation.by == "tail" else validation.fraction
    return SplitPlan(fraction, {source: each.tail for source, each in tails.items()}, before)


def _all_tails(corpus: Corpus, fraction: float, progress: ProgressCallback) -> SourceTails:
    """Return the tail of every source, from the characters (or tokens) of all files, whichever are selected."""
    characters = defaultdict[int, Counter[int]](Counter)
    whole = replace(corpus, file_range=range(len(corpus.files)))
    for row in read_with_progress(whole, partial(progress, "measure")):
        characters[corpus.files[row.file].source][row.file] += 0 if row.content is None else len(row.content)
    return {source: SourceTail(tail_start(each.total(), fraction), each) for source, each in characters.items()}


def vocabulary_of_given_tokenizer(config: DataConfig) -> Vocabulary | None:
    """Return the vocabulary of the recipe's tokenizer; None if it is to be trained."""
    settings = config.tokenizer
    if settings.path is None:
        return None
    return Vocabulary.from_tokenizer(load_tokenizer(settings.path, settings.eos_token))


def make_tokenizer(
    config: DataConfig, corpus: Corpus, plan: SplitPlan, folder: Path, progress: ProgressCallback
) -> tuple[Tokenizer, list[str]]:
    """Load the tokenizer, or train it on the training text, and save it; return it, and notes for the user.

    A tokenizer that an interrupted run has already saved in ``folder`` is reused. DataError if it cannot be read or
    trained.
    """
    settings = config.tokenizer
    given = None if settings.path is None else load_tokenizer(settings.path, settings.eos_token)
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.making")
        shutil.rmtree(unfinished, ignore_errors=True)
        (given or _train_tokenizer(config, corpus, plan, progress)).save(unfinished)
        unfinished.rename(folder)  # so a folder under its final name is complete
    tokenizer = load_saved(folder)
    if given is not None:
        said = describe_tokenizer(given, _some_texts(corpus))
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
    texts = read_texts(corpus, plan, partial(progress, "sample"), counts)
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


def refuse_empty_split(config: DataConfig, corpus: Corpus, counts: dict[Split, int], undo: str = "") -> None:
    """Raise DataError if a split that the recipe wants has no text; ``undo`` ends the message."""
    if counts["train"] == 0:
        raise DataError(f"{corpus.files[0].path}{more(corpus.files)}: no text for training: {_WHY_NO_TEXT}")
    validation = config.validation
    # With auto, a corpus of a character, or of copies, goes without.
    goes_without = validation.path is None and (validation.fraction == 0 or validation.by == "auto")
    if counts["validation"] > 0 or goes_without:
        return
    if validation.path is not None:
        duplicate = " or a duplicate of one in the corpus" if config.duplicates == "drop" else ""
        raise DataError(f"data.validation.path {validation.path}: every document in it is null or empty{duplicate}.")
    raise DataError(
        f"data.validation: none of the {counts['train']:,} documents is chosen for validation. {NONE_CHOSEN}{undo}."
    )


NONE_CHOSEN = (
    "Use data.validation.by=auto, which then holds out the end of each source, or data.validation.fraction=0 for no "
    "validation"
)
_WHY_NO_TEXT = (
    "every document is null, empty, or validation text. Check data.path and data.text_column; a corpus of few "
    "documents needs data.validation.by=auto or tail."
)
