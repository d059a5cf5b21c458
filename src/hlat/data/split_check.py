"""Split a small corpus into training and validation text as the preparation does, without tokenizing it.

files of each source --read, hashed or cut--> SourceSplit: documents, bytes, tokens of both splits --> problem, or a
warning

Documents are chosen for validation by hash, or a tail is cut off, so what is kept aside of a small corpus is found by
reading it only. A tail is cut off all documents, before copies are left out, as the preparation does. Corpora of more
than 16 MB, or of more text than that once it is decompressed, are not split here: the preparation says the same of
them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hlat.config import DataConfig
from hlat.data.formats.document import Content, Vocabulary, content_bytes
from hlat.data.formats.records import convert_file_errors
from hlat.data.formats.streams.decompression import is_compressed, open_decompressed
from hlat.data.sources.held_out import HeldOut
from hlat.data.sources.source_file import SourceFile
from hlat.data.sources.split import SplitRule, hash_share, hash_threshold, tail_start
from hlat.runtime.errors import DataError

_MOST_BYTES = 1 << 24  # of files, and of their text: a few tenths of a second
_CHUNK = 1 << 20

CountTokens = Callable[[Content], int]
"""Returns the tokens of a document, or an upper bound."""


def most_tokens(content: Content) -> int:
    """Bound the tokens of a document for a tokenizer that is to be trained: a byte is the smallest token."""
    return len(content.encode()) if isinstance(content, str) else len(content)


@dataclass
class SourceSplit:
    """Documents and bytes of a source.

    Attributes:
        name: name or path of the source.
        documents: documents that are not empty.
        held_out: those of them that are wholly for validation.
        bytes: bytes of all of them.
        held_out_bytes: bytes of text for validation.
        training_pieces: documents, and a beginning of one, that are for training.
        training_tokens: tokens of these as they were counted or bounded, without end-of-text tokens.
        smallest_share: fraction of the corpus above which the first of them is for validation.
    """

    name: str
    documents: int = 0
    held_out: int = 0
    bytes: int = 0
    held_out_bytes: int = 0
    training_pieces: int = 0
    training_tokens: int = 0
    smallest_share: float = 1.0


def splits_by_hash(data: DataConfig) -> bool:
    """Return True if whole documents are kept aside for validation."""
    validation = data.validation
    return validation.path is None and validation.fraction > 0 and validation.by == "document"


def split_sources(
    data: DataConfig,
    files: Mapping[str, Sequence[SourceFile]],
    vocabulary: Vocabulary | None,
    count_tokens: CountTokens = most_tokens,
) -> list[SourceSplit]:
    """Split each source of a corpus of text; return nothing if it is too large to be read here.

    Args:
        data: the data section.
        files: local files by name of the source.
        vocabulary: vocabulary of the tokenizer; None if it is trained.
        count_tokens: counts the tokens of a document, or bounds them.
    """
    every = [file for each in files.values() for file in each]
    if any(file.cached_store is not None or file.format.holds_tokens for file in every):
        return []
    if sum(file.size for file in every) > _MOST_BYTES:
        return []
    reader = _BoundedReader(vocabulary, data.duplicates == "drop")
    try:
        return [_split(name, reader.documents(each), data, count_tokens) for name, each in files.items()]
    except (DataError, _TooLongError):  # bad rows and files are the preparation's to report
        return []


class _TooLongError(Exception):
    """The corpus has more text than is read here."""


class _ReadDocument(NamedTuple):
    """A document, its ``content_bytes``, and whether it is left out as a copy of an earlier one."""

    content: Content
    encoded: bytes
    is_left_out: bool


@dataclass
class _BoundedReader:
    """Reads the documents of all sources that are not empty, up to ``_MOST_BYTES``.

    Attributes:
        vocabulary: vocabulary of the tokenizer; None if it is trained.
        drops_copies: True if copies of earlier documents are left out.
        read: bytes of all documents so far.
        seen: the documents so far, if copies are left out.
    """

    vocabulary: Vocabulary | None
    drops_copies: bool
    read: int = 0
    seen: set[bytes] = field(default_factory=set)

    def documents(self, files: Sequence[SourceFile]) -> Iterator[_ReadDocument]:
        """Yield the documents of a source, copies included.

        Raises:
            DataError: a file cannot be read.
            _TooLongError: there is more text.
        """
        for file in files:
            if file.format.is_one_document and _is_too_long(file):
                raise _TooLongError
            with file.as_input(Path(file.path), self.vocabulary) as opened:
                for row in file.format.documents(opened):
                    if row.content is not None and len(row.content):
                        yield self._document(row.content)

    def _document(self, content: Content) -> _ReadDocument:
        encoded = content_bytes(content)
        self.read += len(encoded)
        if self.read > _MOST_BYTES:
            raise _TooLongError
        is_copy = encoded in self.seen
        if self.drops_copies:
            self.seen.add(encoded)
        return _ReadDocument(content, encoded, is_copy)


def _is_too_long(file: SourceFile) -> bool:
    """Return True if a compressed text has more than ``_MOST_BYTES``; its format would read all of it at once."""
    path = Path(file.path)
    if not is_compressed(path):
        return False
    with convert_file_errors(path, file.format.kind), path.open("rb") as raw:
        stream, left = open_decompressed(path, raw), _MOST_BYTES
        while left >= 0 and (chunk := stream.read(_CHUNK)):
            left -= len(chunk)
    return left < 0


def _split(name: str, documents: Iterable[_ReadDocument], data: DataConfig, count_tokens: CountTokens) -> SourceSplit:
    found, offset = SourceSplit(name), 0
    rule = SplitRule(hash_threshold(data.validation.fraction) if splits_by_hash(data) else 0)
    if _cuts_tail(data):
        documents = list(documents)  # where the tail begins follows from the length of all, copies included
        rule = SplitRule(boundary=tail_start(sum(len(each.content) for each in documents), data.validation.fraction))
    for content, encoded, is_left_out in documents:
        start, offset = offset, offset + len(content)
        if is_left_out:
            continue
        training = _training_pieces(rule, content, encoded, start)
        found.documents += 1
        found.bytes += len(encoded)
        found.held_out += not training
        found.held_out_bytes += len(encoded) - sum(len(content_bytes(piece)) for piece in training)
        found.training_pieces += len(training)
        found.training_tokens += sum(map(count_tokens, training))
        found.smallest_share = min(found.smallest_share, hash_share(encoded))
    return found


def _training_pieces(rule: SplitRule, document: Content, encoded: bytes, offset: int) -> Sequence[Content]:
    """Return the parts of a document that are for training: all of it, none, or what is before the tail."""
    if isinstance(document, str):
        return [piece for split, piece in rule.split_document(document, encoded, offset) if split == "train"]
    return [tokens for split, tokens in rule.split_document(document, encoded, offset) if split == "train"]


def _cuts_tail(data: DataConfig) -> bool:
    """Return True if the end of each source is for validation; with a path for validation nothing is."""
    validation = data.validation
    return validation.path is None and validation.fraction > 0 and validation.by == "tail"


def describe_empty_split(splits: Sequence[SourceSplit]) -> str:
    """Return why the corpus has no validation text, and what would work; empty if it has some."""
    documents = sum(each.documents for each in splits)
    if not documents or any(each.held_out for each in splits):
        return ""
    counted = "the only document of the corpus is not" if documents == 1 else f"none of the {documents:,} documents is"
    share = math.ceil(min(each.smallest_share for each in splits) * 100 + 1e-9) / 100
    larger = f", data.validation.fraction={share:g}, which keeps one aside" if documents > 1 and share < 0.5 else ""
    return (
        f"{counted} chosen for validation. Use data.validation.by=tail, which cuts inside a document{larger}, or "
        "data.validation.fraction=0 for no validation."
    )


def held_out(splits: Sequence[SourceSplit], bytes_per_token: float) -> list[HeldOut]:
    """Estimate the tokens of each source and of its validation text."""
    return [
        HeldOut(
            each.name,
            each.held_out,
            each.documents,
            each.held_out_bytes / bytes_per_token,
            each.bytes / bytes_per_token,
        )
        for each in splits
    ]
