"""Check the inputs of a recipe without preparing them: files, columns, first rows, tokenizers, sizes, the split.

    data section --check_inputs--> InputReport: every problem at once, and the size of the corpus
                     |
                     `- files of each source --read, hashed or cut--> SourceSplit: documents, bytes, tokens of both
                        splits --> problem, or a warning                              (small corpora only)

The files of each source are listed; of a few of them the footer and the first rows are read: what `hlat train` would
find out after minutes of reading. Files of object stores are listed only if the caller asks for it.

What is kept aside of a small corpus is found by reading it. A tail is cut off all documents, before copies are left
out, as the preparation does. Corpora of more than 16 MB, or of more text than that once it is decompressed, are not
split here: the preparation says the same of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import log2
from pathlib import Path

from hlat.config import DataConfig, Recipe, short
from hlat.data.corpus_files import NumberedSource, cache_location, default_column, files_of_source, numbered_sources
from hlat.data.documents import (
    Content,
    HeldOut,
    SplitRule,
    Vocabulary,
    content_bytes,
    describe_scarce,
    describe_tails,
    hash_threshold,
    tail_start,
)
from hlat.data.formats.rows import convert_file_errors
from hlat.data.formats.streams import is_compressed, open_decompressed
from hlat.data.prepare.corpus import NONE_CHOSEN, Corpus, SourceTails, bytes_per_token, short_sources
from hlat.data.prepared.consistency import recipe_locations
from hlat.data.prepared.manifest import DataManifest, read_data_manifest
from hlat.data.prepared.prepared_folder import current_settings
from hlat.data.source_file import SourceFile, read_beginnings
from hlat.data.source_listing import SourceNotFoundError, doubts, first_bytes, refuse
from hlat.data.stores.cache import Cache
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.load import describe_tokenizer, load_tokenizer
from hlat.runtime.errors import DataError, StorageError
from hlat.runtime.urls import is_url

_MOST_BYTES = 1 << 24  # of files, and of their text: a few tenths of a second
_READ_CHUNK = 1 << 20

CountTokens = Callable[[Content], int]  # returns the tokens of a document, or an upper bound


def most_tokens(content: Content) -> int:
    """Return an upper bound of the tokens of a document, for a tokenizer that is to be trained."""
    return len(content.encode()) if isinstance(content, str) else len(content)  # a byte is the smallest token


@dataclass
class SourceSplit:
    """Amount of a source's text, and of the part of it that is for training."""

    name: str  # name or path of the source
    documents: int = 0  # documents that are not empty
    held_out: int = 0  # those of them that are wholly for validation
    bytes: int = 0  # bytes of all of them
    held_out_bytes: int = 0  # bytes of text for validation
    training_pieces: int = 0  # documents, and a beginning of one, that are for training
    training_tokens: int = 0  # tokens of these as they were counted or bounded, without end-of-text tokens


def _splits_by(data: DataConfig, *ways: str) -> bool:
    """Return True if validation text is kept aside in one of these values of data.validation.by."""
    validation = data.validation
    return validation.path is None and validation.fraction > 0 and validation.by in ways


def split_sources(
    data: DataConfig,
    files: Mapping[str, Sequence[SourceFile]],
    vocabulary: Vocabulary | None,
    count_tokens: CountTokens = most_tokens,
    short: SourceTails | None = None,
) -> list[SourceSplit]:
    """Split each source, given as local files by name; return nothing if there is too much to read."""
    every = [file for each in files.values() for file in each]
    # Files of stores would have to be fetched, and tokens are not text.
    if any(file.cached_store is not None or file.format.holds_tokens for file in every):
        return []
    if sum(file.size for file in every) > _MOST_BYTES:
        return []
    found, left, seen = list[SourceSplit](), _MOST_BYTES, set[bytes]()
    try:
        for name, of_source in files.items():
            documents = list[tuple[Content, bool]]()
            for content in _contents(of_source, vocabulary):
                encoded = content_bytes(content)
                if (left := left - len(encoded)) < 0:
                    return []
                documents.append((content, encoded in seen))
                if data.duplicates == "drop":
                    seen.add(encoded)
            tail = (short or {}).get(of_source[0].source) if of_source else None
            found.append(_split_source(name, documents, data, count_tokens, None if tail is None else tail.tail))
    except (DataError, _TooLongError):  # bad rows and files are the preparation's to report
        return []
    return found


class _TooLongError(Exception):
    """The corpus has more text than is read here."""


def _contents(files: Sequence[SourceFile], vocabulary: Vocabulary | None) -> Iterator[Content]:
    """Yield the documents of a source that are not empty, copies included."""
    for file in files:
        if file.format.is_one_document and _is_too_long(file):
            raise _TooLongError
        with file.as_input(Path(file.path), vocabulary) as opened:
            for row in file.format.documents(opened):
                if row.content is not None and len(row.content):
                    yield row.content


def _is_too_long(file: SourceFile) -> bool:
    """Return True if a compressed text has more than ``_MOST_BYTES``."""
    path = Path(file.path)
    if not is_compressed(path):
        return False
    with convert_file_errors(path, file.format.kind), path.open("rb") as raw:
        # Counted here, because its format would read all of it at once.
        stream, left = open_decompressed(path, raw), _MOST_BYTES
        while left >= 0 and (chunk := stream.read(_READ_CHUNK)):
            left -= len(chunk)
    return left < 0


def _split_source(
    name: str,
    documents: Sequence[tuple[Content, bool]],
    data: DataConfig,
    count_tokens: CountTokens,
    tail: int | None,
) -> SourceSplit:
    """Split the documents of a source, if at ``tail`` where that is given; those with True are copies, left out."""
    found, offset = SourceSplit(name), 0
    rule = SplitRule(hash_threshold(data.validation.fraction) if _splits_by(data, "document", "auto") else 0, tail)
    if _splits_by(data, "tail"):  # where the tail begins follows from the length of all, copies included
        rule = SplitRule(boundary=tail_start(sum(len(each) for each, _ in documents), data.validation.fraction))
    for content, is_left_out in documents:
        start, offset = offset, offset + len(content)
        if is_left_out:
            continue
        encoded = content_bytes(content)
        pieces = rule.split_document(content, encoded, start)
        training = [piece for split, piece in pieces if split == "train"]
        found.documents += 1
        found.bytes += len(encoded)
        found.held_out += not training
        found.held_out_bytes += len(encoded) - sum(len(content_bytes(piece)) for piece in training)
        found.training_pieces += len(training)
        found.training_tokens += sum(map(count_tokens, training))
    return found


_BEGINNING_BYTES = 2048  # files of a source whose first bytes are looked at, evenly spread; preparation looks at all
_SAMPLED_FILES = 8  # of a source whose first rows are read, evenly spread
_SAMPLED_ROWS = 4  # at the beginning of such a file
_DOUBTFUL_BYTES_PER_TOKEN = 16  # no tokenizer has fewer tokens in a text of words, so more text is long enough


@dataclass(frozen=True)
class InputProblem:
    """An input that cannot be used, as a message about one field."""

    field: str  # dotted path of the field that names it
    message: str  # what is wrong, where and what would work; ends with a full stop
    value: str | float  # value of the field


@dataclass
class InputReport:
    """Findings of ``check_inputs``: problems, doubts and sizes."""

    problems: list[InputProblem] = field(default_factory=list)  # every problem, in the order of the fields
    files: int = 0  # of the corpus
    text_bytes: int = 0  # size of the local files of the corpus
    most_tokens: int | None = None  # upper bound of the training tokens, end tokens included; None if unknown
    # Tokens of an epoch: counted if the data is prepared or short, else estimated; None if unknown.
    training_tokens: float | None = None
    is_prepared: bool = False  # True if the data is prepared already
    doubts: list[str] = field(default_factory=list)  # sentences about files that seem to be absent or are there twice
    scarce_validation: str = ""  # about sources with few documents for validation; empty if there is none
    # What the tokenizer loses of the text, and what would work; None for nothing.
    lossy_tokenizer: tuple[str, str] | None = None


def check_inputs(
    data: DataConfig, folder: Path, vocab_size: int | None, sets: Mapping[str, str], *, stores: bool
) -> InputReport:
    """Check every input of a recipe, and report all problems at once.

    Data that is prepared in ``folder`` needs no corpus and no tokenizer any more. ``vocab_size`` is the number of
    embedding rows of the model, None if unknown; ``sets`` is ``evaluation.sets``. With ``stores``, the files of URLs
    are listed too, which asks their stores.
    """
    manifest = _manifest(folder)
    report = InputReport(is_prepared=manifest is not None)
    # Before the files: the first rows of files of tokens are compared with its vocabulary.
    tokenizer = _check_tokenizer(data, vocab_size, folder, manifest, report)
    vocabulary = None if tokenizer is None else Vocabulary.from_tokenizer(tokenizer)
    column, fields = default_column(data), {f"evaluation.sets.{name}": path for name, path in sets.items()}
    named = {field: NumberedSource(-1, field, path, column, None) for field, path in fields.items()}
    sources = {source.field: source for source in numbered_sources(data)} | named
    cache, files = Cache(*cache_location(data, folder)), dict[str, list[SourceFile]]()
    for name, source in sources.items():
        if is_url(source.path) and not stores:
            continue
        try:
            files[name] = files_of_source(source, cache)
            was_read = manifest is not None and name not in named  # by a version that perhaps checked less
            found = () if was_read else _unreadable(source.path, files[name], data, vocabulary)
            report.problems += [_problem(name, source.path, problem) for problem in found]
        except SourceNotFoundError as error:
            if manifest is None or name in named or data.mode == "online":  # whose text is still to be read
                report.problems.append(_problem(name, source.path, str(error)))
            elif (recorded := manifest.places["corpus"]) != recipe_locations(data)["corpus"]:
                other = f"{error} {folder} holds data prepared from another path: {' '.join(recorded)}."
                report.problems.append(_problem(name, source.path, other))
        except DataError as error:
            report.problems.append(_problem(name, source.path, str(error)))
    if tokenizer is not None:
        texts = [text for each in files.values() for text in read_beginnings(each)]
        try:
            report.lossy_tokenizer = describe_tokenizer(tokenizer, texts)
        except DataError as error:
            report.problems.append(_problem("data.tokenizer.path", str(data.tokenizer.path), str(error)))
    corpus = [source for source in sources.values() if source.number >= 0]
    if all(source.field in files for source in corpus):
        all_files = [file for source in corpus for file in files[source.field]]
        report.doubts = doubts(all_files)
        _measure(data, all_files, report)
        if manifest is None and not report.problems:
            named_files = {source.name or source.path: files[source.field] for source in corpus}
            _check_split(data, named_files, tokenizer, report)
    if manifest is not None and "train" in manifest.splits:
        report.training_tokens = manifest.splits["train"].tokens
    return report


def with_first_tokenizer(recipe: Recipe) -> DataConfig:
    """Return the data of a later stage with the tokenizer of the first as it is given, until that is prepared."""
    place, data = recipe.place, recipe.data
    if not place or not place.index or data.tokenizer.path != str(place.run.prepared_dir / "tokenizer"):
        return data
    is_made = Path(data.tokenizer.path).exists()
    return data if is_made else data.model_copy(update={"tokenizer": place.run.data.tokenizer})


def _manifest(folder: Path) -> DataManifest | None:
    """Read the manifest; one that cannot be read is left to the preparation, which explains it."""
    try:
        return read_data_manifest(folder)
    except (DataError, OSError):
        return None


def _problem(name: str, value: str, message: str) -> InputProblem:
    """Make a problem of an error's message, without the path that it begins with if the value shows it."""
    text = (message if short(value) != repr(value) else message.removeprefix(f"{value}: ")).rstrip()
    return InputProblem(name, text if text.endswith((".", "`")) else f"{text}.", value)


def _check_tokenizer(
    data: DataConfig, vocab_size: int | None, folder: Path, manifest: DataManifest | None, report: InputReport
) -> Tokenizer | None:
    """Load and check the tokenizer; prepared data has a copy, so only see that no other one is named."""
    path = data.tokenizer.path
    if path is None:
        return None
    try:
        if manifest is not None:
            current_settings(folder, manifest, data)
            return None
        tokenizer = load_tokenizer(path, data.tokenizer.eos_token)
    except DataError as error:
        message = str(error).removeprefix(f"data.tokenizer.path {path}: ")
        report.problems.append(_problem("data.tokenizer.path", path, message))
        return None
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        needed = tokenizer.vocab_size
        reason = f"the tokenizer has {needed:,} tokens, the model only {vocab_size:,} rows (model.vocab_size)."
        remedy = f"Set model.vocab_size to at least {needed}, or give a smaller tokenizer."
        report.problems.append(InputProblem("data.tokenizer.path", f"{reason} {remedy}", path))
    return tokenizer


def _unreadable(source: str, files: list[SourceFile], data: DataConfig, vocabulary: Vocabulary | None) -> Iterator[str]:
    """Yield the problem of the first file of a sample whose first rows cannot be read."""
    local = [file for file in files if file.cached_store is None]
    refuse(source, list(first_bytes(local[:: max(1, -(-len(local) // _BEGINNING_BYTES))], data.unreadable_rows)))
    for file in local[:: max(1, -(-len(local) // _SAMPLED_FILES))]:
        if file.format.is_one_document or (file.format.holds_tokens and vocabulary is None):
            continue  # has no rows; or ids, which mean nothing without a tokenizer, and the lack of one is reported
        try:
            problem = _bad_beginning(file, data, vocabulary)
        except DataError as error:
            problem = str(error)
        if problem:
            yield problem
            return


def _bad_beginning(file: SourceFile, data: DataConfig, vocabulary: Vocabulary | None) -> str:
    """Return the problem of the first rows of a file, or an empty string."""
    path = Path(file.path)
    with file.as_input(path, vocabulary) as opened_file:
        rows = list(islice(file.format.documents(opened_file), _SAMPLED_ROWS))
    for row in rows:
        if row.error is not None and not data.unreadable_rows:
            where = file.format.address(row.row, row.error.line, row.position)
            return f"{path}{where}: {row.error.reason}. {row.error.remedy}"
    return ""


def _is_plain_text(file: SourceFile) -> bool:
    """Return True if the size of a file is about that of its text."""
    # Formats that may be compressed as a whole (jsonl, csv, text) are not compressed in themselves; parquet and arrow
    # are.
    is_plain = file.format.compressible and not is_compressed(Path(file.path))
    return file.cached_store is None and not file.format.holds_tokens and is_plain


def _measure(data: DataConfig, files: list[SourceFile], report: InputReport) -> None:
    """Bound and estimate the tokens of a corpus by the size of its files, where these are plain text."""
    report.files = len(files)
    report.text_bytes = sum(file.size for file in files)
    if not files or not all(map(_is_plain_text, files)):
        return
    if all(file.format.is_one_document for file in files) and data.tokenizer.path is None:
        report.most_tokens = report.text_bytes + len(files)  # a byte is the smallest token; and an end per document
    kept = 1.0 if data.validation.path is not None else 1.0 - data.validation.fraction
    report.training_tokens = report.text_bytes / _token_bytes(data) * kept


def _token_bytes(data: DataConfig) -> float:
    """Estimate the bytes of text in a token: of a small vocabulary they are fewer."""
    if data.tokenizer.path is not None or data.tokenizer.train != "bpe":
        return bytes_per_token(data)
    # English plays: 2.1 bytes with 512 tokens, 2.7 with 1,024, 3.6 with 4,096. Python: 1.7 with 300, 3.8 with 1,000.
    return max(1.0, min(bytes_per_token(data), 0.5 * log2(data.tokenizer.vocab_size) - 1.9))


def _token_counter(data: DataConfig, tokenizer: Tokenizer | None, text_bytes: int) -> CountTokens | None:
    """Return a counter of tokens; None if counting takes long, or the tokenizer is to be trained."""
    if data.tokenizer.path is None:
        return len if data.tokenizer.train == "char" else None
    # An exact count matters only where the text is so short that it may be less than a sample.
    if tokenizer is None or text_bytes > _DOUBTFUL_BYTES_PER_TOKEN * (data.sequence_length + 1):
        return None
    return lambda content: len(tokenizer.encode(content)) if isinstance(content, str) else len(content)


def _adds_ends(data: DataConfig, tokenizer: Tokenizer | None) -> bool:
    # A vocabulary of characters has no end token unless the recipe names one.
    return data.tokenizer.eos_token not in (None, "auto") if tokenizer is None else tokenizer.eos_id is not None


def _check_split(
    data: DataConfig, files: Mapping[str, list[SourceFile]], tokenizer: Tokenizer | None, report: InputReport
) -> None:
    """Report how much of each source of a small corpus is for validation, and how many tokens there can be."""
    vocabulary = None if tokenizer is None else Vocabulary.from_tokenizer(tokenizer)
    count = _token_counter(data, tokenizer, report.text_bytes)
    short = _short_sources(data, files, vocabulary)
    splits = split_sources(data, files, vocabulary, count or most_tokens, short)
    if any(each.documents for each in splits):
        tokens = sum(each.training_tokens for each in splits)
        is_bounded = count is not None or data.tokenizer.path is None
        report.most_tokens = tokens + sum(each.training_pieces for each in splits) if is_bounded else None
        training_bytes = sum(each.bytes - each.held_out_bytes for each in splits)
        ends = sum(each.training_pieces for each in splits) if _adds_ends(data, tokenizer) else 0
        report.training_tokens = training_bytes / _token_bytes(data) if count is None else tokens + ends
    unread = [each for each in files.values() if _is_one_text(each) and not _are_read(each, vocabulary)]
    tails = len(short) + (len(unread) if _splits_by(data, "auto") and data.mode == "prepared" else 0)
    report.scarce_validation = describe_tails(tails, len(files), data.validation.fraction)
    documents = sum(each.documents for each in splits)
    if not _splits_by(data, "document", "auto") or short or not documents:
        return
    if not any(each.held_out for each in splits):
        if data.mode == "online":  # no law of the mode demands validation text
            report.scarce_validation = f"{_none_chosen(documents)} data.mode=prepared would hold out the end."
        elif _splits_by(data, "document"):
            problem = f"{_none_chosen(documents)} {NONE_CHOSEN}."
            report.problems.append(InputProblem("data.validation.by", problem, data.validation.by))
    elif _splits_by(data, "document"):
        size = bytes_per_token(data)
        held = [HeldOut(each.name, each.held_out, each.held_out_bytes / size, each.bytes / size) for each in splits]
        report.scarce_validation = describe_scarce(held, data.validation.fraction)


def _none_chosen(documents: int) -> str:
    if documents == 1:
        return "the only document of the corpus is not chosen for validation."
    return f"none of the {documents:,} documents is chosen for validation."


def _short_sources(
    data: DataConfig, files: Mapping[str, list[SourceFile]], vocabulary: Vocabulary | None
) -> SourceTails:
    """Find the sources of which the preparation will hold out the tail, where little has to be read for that."""
    readable = [file for of_source in files.values() if _are_read(of_source, vocabulary) for file in of_source]
    with suppress(DataError, StorageError):  # the preparation's to report
        corpus = Corpus(readable, range(len(readable)), data.unreadable_rows, vocabulary)
        return short_sources(data, corpus, _MOST_BYTES)
    return {}


def _is_one_text(files: list[SourceFile]) -> bool:
    """Return True for a source of one document, which is all its text: its tail is held out, however long it is."""
    return len(files) == 1 and files[0].format.is_one_document


def _are_read(files: list[SourceFile], vocabulary: Vocabulary | None) -> bool:
    """Return True if a check reads the files of a source."""
    return not any(
        file.cached_store is not None
        # Ids mean nothing without a tokenizer; a text that is one document has to be read as a whole.
        or (file.format.holds_tokens and vocabulary is None)
        or (file.format.is_one_document and (file.size > _MOST_BYTES or _is_too_long(file)))
        for file in files
    )
