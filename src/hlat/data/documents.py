"""Documents: their content, whether they are training or validation text, and how much of them is kept aside.

    row of a file --> Content: text, or token ids | BadRow: why it could not be read
    content, or its position in the source --SplitRule--> training | validation
    counts of each source --describe_scarce--> a warning that too little is kept aside, or none

Text and ids both have a length, can be sliced, and have a byte form for hashing.

The split of a document does not depend on the worker, on time, or on other documents. So the split of a corpus is the
same for any number of workers and after interruptions. If it is made by hash of the text or the tokens, exact copies of
a document are in the same split.

Worker processes import this module, so it imports neither torch, pyarrow and pydantic nor the heavier rooms.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hlat.data.tokenizers.base import TokenIdArray, Tokenizer
from hlat.runtime.terminal import plural

Content = str | TokenIdArray
"""A text, or token ids: uint32, shape (tokens,), without an end-of-sequence token."""
ContentT = TypeVar("ContentT", str, TokenIdArray)

_ENCODED_DTYPE = np.dtype("<u4")


class Vocabulary(NamedTuple):
    """Valid token ids.

    Attributes:
        size: ids are below this.
        eos_id: id of the end-of-sequence token; None for none.
    """

    size: int
    eos_id: int | None

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """Return the vocabulary of a tokenizer."""
        return cls(tokenizer.vocab_size, tokenizer.eos_id)

    def first_unknown(self, ids: npt.NDArray[np.integer[Any]]) -> int | None:
        """Return the index of the first id that is not in the vocabulary; None if all are."""
        if not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) < self.size:
            return None
        return int(np.flatnonzero((ids < 0) | (ids >= self.size))[0])

    def document(self, ids: npt.NDArray[np.integer[Any]]) -> TokenIdArray:
        """Return the content of a document that is stored as ids, all in the vocabulary.

        Every document gets an end-of-sequence token when samples are made, so one at its end is removed here: ids
        that were stored with it give the same documents, hashes and validation tail as ids stored without it.
        """
        ends = self.eos_id is not None and len(ids) > 0 and int(ids[-1]) == self.eos_id
        return (ids[:-1] if ends else ids).astype(np.uint32)


def content_bytes(content: Content) -> bytes:
    """Encode a text as UTF-8, or tokens as little-endian uint32."""
    return content.encode() if isinstance(content, str) else content.astype(_ENCODED_DTYPE).tobytes()


def tokens_from_bytes(encoded: bytes) -> TokenIdArray:
    """Decode tokens from the bytes that ``content_bytes`` returned; the array is read-only."""
    return np.frombuffer(encoded, dtype=_ENCODED_DTYPE)


def tokenize_contents(contents: Sequence[Content], tokenizer: Tokenizer) -> list[TokenIdArray]:
    """Tokenize each document that is text; pass documents that are tokens through.

    Returns:
        Tokens of each document, uint32, shape (tokens,), without end-of-sequence tokens.

    Raises:
        DataError: the tokenizer cannot encode a text.
    """
    encoded = iter(tokenizer.encode_documents([content for content in contents if isinstance(content, str)]))
    return [next(encoded) if isinstance(content, str) else content for content in contents]


def text_byte_count(content: Content, tokenizer: Tokenizer) -> int:
    """Count the UTF-8 bytes of a text, or of the text that tokens stand for."""
    return len(content.encode()) if isinstance(content, str) else int(tokenizer.token_bytes[content].sum())


class BadRow(NamedTuple):
    """A row that could not be read.

    Attributes:
        file: index of its file.
        row: index in the file, from 0.
        line: line number in the file, from 1; None if rows are not lines.
        rows: rows of the work unit up to and including this one.
        reason: the problem.
        remedy: a sentence that says how to fix it.
    """

    file: int
    row: int
    line: int | None
    rows: int
    reason: str
    remedy: str


Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")

_SPLIT_KEY = b"hlat validation split"


def hash_threshold(fraction: float) -> int:
    """Return the threshold below which the 64-bit hashes of a share ``fraction`` of all documents lie."""
    return int(fraction * 2.0**64)


def tail_start(length: int, fraction: float) -> int:
    """Return the character or token at which the validation tail of a source begins: int(n * (1 - fraction)).

    This is the cut that nanoGPT makes.
    """
    return int(length * (1 - fraction))


@dataclass(frozen=True)
class SplitRule:
    """Rule that assigns the documents of one work unit to the splits.

    Attributes:
        below: documents whose hash lies below this are validation documents; ignored if there is a boundary.
        boundary: characters (or tokens) of the unit before its validation tail; None for no tail.
    """

    below: int = 0
    boundary: int | None = None

    def split_document(self, content: ContentT, encoded: bytes, offset: int) -> list[tuple[Split, ContentT]]:
        """Assign a document to a split; cut it in two if the validation tail begins inside it.

        Args:
            content: the document.
            encoded: the document as ``content_bytes`` returns it.
            offset: characters (or tokens) of the unit before this document.

        Returns:
            The split and content of each piece that is not empty.
        """
        if self.boundary is None:
            return [(self.split_of(encoded), content)]
        cut = min(max(self.boundary - offset, 0), len(content))
        pieces: list[tuple[Split, ContentT]] = [("train", content[:cut]), ("validation", content[cut:])]
        return [piece for piece in pieces if len(piece[1])]

    def split_of(self, encoded: bytes) -> Split:
        """Return the split of a document by the hash of its ``content_bytes``; the boundary is ignored."""
        return "validation" if self.below > 0 and _split_hash(encoded) < self.below else "train"


def hash_share(encoded: bytes) -> float:
    """Return the fraction of the corpus above which a document, as ``content_bytes`` returns it, is for validation."""
    return _split_hash(encoded) / 2.0**64


ALL_VALIDATION = SplitRule(boundary=0)


def _split_hash(encoded: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8, key=_SPLIT_KEY).digest(), "little")


_ENOUGH_TOKENS = 10_000
"""Tokens for which the error of a mean loss is small: the losses of single tokens vary by 2 to 3 nats, so that the mean
of 10,000 tokens is known to 0.03 nats at best, less exactly if they are of few documents."""
_ENOUGH_DOCUMENTS = 5  # of a source, over which a loss says something about the others
_NAMED_SOURCES = 3  # sources that a message names
_LARGEST_SHARE = 0.2  # that is suggested; a corpus that needs more is too small


class HeldOut(NamedTuple):
    """Text of a source that is kept aside for validation.

    Attributes:
        source: name or path of the source.
        documents: documents kept aside.
        of_documents: all documents of the source.
        tokens: tokens kept aside.
        of_tokens: all tokens of the source.
    """

    source: str
    documents: int
    of_documents: int
    tokens: float
    of_tokens: float

    @property
    def is_scarce(self) -> bool:
        """True if the loss over this text says little about the source."""
        return self.tokens < _ENOUGH_TOKENS and self.documents < _ENOUGH_DOCUMENTS


def describe_scarce(held: Sequence[HeldOut], fraction: float, about: str = "") -> tuple[str, str] | None:
    """Describe the sources with too little validation text, for data.validation.by=document.

    Args:
        held: the sources of the corpus.
        fraction: data.validation.fraction.
        about: "about " if tokens are estimated.

    Returns:
        What is wrong, and what would work; None if nothing is.
    """
    scarce = [each for each in held if each.of_documents and each.is_scarce]
    if not scarce:
        return None
    parts = [
        f"{each.documents:,} of {each.of_documents:,} {'document' if each.of_documents == 1 else 'documents'} of "
        f"{each.source} ({about}{each.tokens:,.0f} tokens)"
        for each in scarce
    ]
    text = f"{_listed(parts)} for validation, chosen by hash: a loss over so little text says little."
    least = min(scarce, key=lambda each: each.of_tokens)
    needed = max(fraction, _ENOUGH_TOKENS / least.of_tokens)
    tail = f"data.validation.by=tail keeps the last {fraction:.3g} of each source: {_tail(scarce, fraction)}"
    if needed > _LARGEST_SHARE:
        return text, f"{tail}. Or give a file of validation text of its own as data.validation.path."
    share = math.ceil(needed * 100) / 100
    return text, f"{tail}; with data.validation.fraction={share:.3g} {_tail(scarce, share)}."


def _tail(sources: Sequence[HeldOut], fraction: float) -> str:
    return _listed([f"about {each.of_tokens * fraction:,.0f} tokens of {each.source}" for each in sources])


def _listed(parts: Sequence[str]) -> str:
    """Join the first three parts; say how many more there are."""
    more = [f"{plural(len(parts) - _NAMED_SOURCES, 'other source')} alike"] if len(parts) > _NAMED_SOURCES else []
    return " and ".join([*parts[:_NAMED_SOURCES], *more])
