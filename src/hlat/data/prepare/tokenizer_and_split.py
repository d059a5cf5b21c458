"""Passes over the whole corpus before tokenization: find the validation tails, train the tokenizer.

documents --characters of each file--> start of each validation tail    (only for data.validation.by=tail)
documents --sample--> tokenizer                                         (unless the recipe gives one)
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from hlat.config import DataConfig
from hlat.data.formats.document import Vocabulary
from hlat.data.manifest.record_checksum import checksum_matches, with_checksum
from hlat.data.prepare.corpus import Corpus, SplitPlan, read_texts, read_with_progress
from hlat.data.sources.beginnings import read_beginnings
from hlat.data.sources.split import SPLITS, Split, tail_start
from hlat.data.stores.atomic_files import write_atomic
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.load import load_saved, load_tokenizer
from hlat.data.tokenizers.round_trip import describe_tokenizer
from hlat.data.tokenizers.training import sample_texts, train_bpe, train_char
from hlat.runtime.errors import DataError, StorageError

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
        characters_of = _characters(corpus.with_all_files, progress)
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


def _characters(corpus: Corpus, progress: ProgressCallback) -> list[int]:
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
        (given or _train(config, corpus, plan, progress)).save(unfinished)
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


def _train(config: DataConfig, corpus: Corpus, plan: SplitPlan, progress: ProgressCallback) -> Tokenizer:
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
