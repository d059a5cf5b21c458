"""What has to be known of the whole corpus before its first document is tokenized: the split and the tokenizer.

documents --characters of each file--> where validation tails begin     (only for data.validation.by=tail)
documents --sample--> tokenizer                                         (unless one is given)
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from hlat.config.sections import DataConfig
from hlat.data.formats import Vocabulary
from hlat.data.manifest import checksum_matches, with_checksum
from hlat.data.prepare.corpus import Corpus, SplitPlan, read_texts, read_with_progress
from hlat.data.sources import SPLITS, Split, tail_start
from hlat.data.stores import write_atomic
from hlat.data.tokenizers import Tokenizer, load_saved, load_tokenizer, sample_texts, train_bpe, train_char
from hlat.runtime import DataError

ProgressCallback = Callable[[str, int, int], None]
"""Called with the stage (hash, measure, sample, tokenize, merge or verify), bytes done, and bytes in all."""

_CHARACTERS = "characters"


def plan_split(config: DataConfig, corpus: Corpus, stored: Path, progress: ProgressCallback) -> SplitPlan:
    """How the corpus is split.

    Args:
        config: the data section.
        corpus: tails are those of the whole corpus, whatever stretch of it is wanted.
        stored: where the characters of each file are kept once they are counted.
        progress: see Progress.
    """
    validation = config.validation
    if validation.path is not None or validation.fraction == 0:
        return SplitPlan(0.0)
    if validation.by == "document":
        return SplitPlan(validation.fraction)
    characters_of = _counted_before(stored)
    if characters_of is None:
        characters_of = _characters(corpus.whole, progress)
        write_atomic(stored, json.dumps(with_checksum({_CHARACTERS: characters_of})).encode())
    counts, before = defaultdict[int, int](int), dict[int, int]()
    for index, characters in enumerate(characters_of):
        if index == corpus.file_range.start:
            before = dict(counts)
        counts[corpus.files[index].source] += characters
    tails = {source: tail_start(count, validation.fraction) for source, count in counts.items()}
    return SplitPlan(0.0, tails, before)


def _counted_before(stored: Path) -> list[int] | None:
    """The characters of each file as an interrupted run counted them; None where it did not, or they are damaged."""
    try:
        record = json.loads(stored.read_bytes())
        return list(record[_CHARACTERS]) if checksum_matches(record) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def vocabulary_of_given_tokenizer(config: DataConfig) -> Vocabulary | None:
    """That of the tokenizer which the recipe gives, if it gives one.

    Raises:
        DataError: it cannot be read.
    """
    asked = config.tokenizer
    return None if asked.path is None else Vocabulary.from_tokenizer(load_tokenizer(asked.path, asked.eos_token))


def _characters(corpus: Corpus, progress: ProgressCallback) -> list[int]:
    """Characters of every file, or tokens where it holds these."""
    counts = [0] * len(corpus.files)
    for document in read_with_progress(corpus, partial(progress, "measure")):
        counts[document.file] += 0 if document.content is None else len(document.content)
    return counts


def make_tokenizer(
    config: DataConfig, corpus: Corpus, plan: SplitPlan, folder: Path, progress: ProgressCallback
) -> tuple[Tokenizer, list[str]]:
    """The tokenizer, given, trained, or left trained by an interrupted run, in a folder; and what to tell of it.

    Args:
        config: the data section.
        corpus: what one is trained on.
        plan: how the corpus is split: validation text trains no tokenizer.
        folder: where the tokenizer goes; beside it there may be one half made.
        progress: see Progress.

    Raises:
        DataError: a tokenizer that cannot be read, or text that none can be trained on.
    """
    asked = config.tokenizer
    if not folder.exists():
        making = folder.with_name(f"{folder.name}.making")
        shutil.rmtree(making, ignore_errors=True)
        given = None if asked.path is None else load_tokenizer(asked.path, asked.eos_token)
        (given or _train(config, corpus, plan, progress)).save(making)
        making.rename(folder)
    tokenizer = load_saved(folder)
    if asked.path is not None:
        return tokenizer, []
    if asked.train == "bpe" and tokenizer.vocab_size < asked.vocab_size:
        return tokenizer, [
            f"The corpus is too small for data.tokenizer.vocab_size = {asked.vocab_size}: "
            f"the tokenizer has {tokenizer.vocab_size} tokens."
        ]
    return tokenizer, []


def _train(config: DataConfig, corpus: Corpus, plan: SplitPlan, progress: ProgressCallback) -> Tokenizer:
    asked = config.tokenizer
    dealt: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    texts = _counted(read_texts(corpus, plan, partial(progress, "sample")), dealt)
    if asked.train == "char":
        alphabet: set[str] = set()
        for _, text in texts:
            alphabet.update(text)
        refuse_empty_split(config, corpus, dealt)
        return train_char(alphabet, asked.eos_token)
    trained_on = (text for split, text in texts if split == "train")
    chosen = sample_texts(trained_on, asked.train_bytes, distinct=config.duplicates == "drop")
    refuse_empty_split(config, corpus, dealt)
    return train_bpe(chosen, asked.vocab_size, asked.eos_token)


def _counted(texts: Iterator[tuple[Split, str]], dealt: dict[Split, int]) -> Iterator[tuple[Split, str]]:
    for split, text in texts:
        dealt[split] += 1
        yield split, text


def refuse_empty_split(config: DataConfig, corpus: Corpus, dealt: dict[Split, int], undo: str = "") -> None:
    """Raise DataError if a split that is wanted has no text, as soon as that is known.

    Args:
        config: the data section.
        corpus: where text was looked for.
        dealt: documents of each split.
        undo: what has to be done first to prepare with other settings.
    """
    if dealt["train"] == 0:
        others = f" and {len(corpus.files) - 1} more" if len(corpus.files) > 1 else ""
        raise DataError(f"{corpus.files[0].path}{others}: no text for training: {_WHY_NO_TEXT}")
    validation = config.validation
    if dealt["validation"] > 0 or (validation.path is None and validation.fraction == 0):
        return
    if validation.path is not None:
        copy = " or a copy of one in the corpus" if config.duplicates == "drop" else ""
        raise DataError(f"data.validation.path {validation.path}: every document in it is null or empty{copy}.")
    tail = "" if validation.by == "tail" else "data.validation.by=tail, which cuts inside a document, "
    raise DataError(
        f"data.validation: none of the {dealt['train']} documents fell to the validation split. Use {tail}"
        f"a larger data.validation.fraction, or data.validation.fraction=0 for no validation{undo}."
    )


_WHY_NO_TEXT = (
    "every document is null, empty, or validation text. Check data.path and data.text_column; a corpus of few "
    "documents takes data.validation.by=tail."
)
