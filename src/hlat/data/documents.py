"""Documents: their content, whether they are training or validation text, and how much of them is kept aside.

    row of a file --> Content: text, or token ids | BadRow: why it could not be read
    content, or its position in the source --SplitRule--> training | validation
    counts of each source --describe_scarce, describe_tails--> a sentence about sources of few documents, or none

Text and ids both have a length, can be sliced, and have a byte form for hashing.

The split of a document does not depend on the worker, on time, or on other documents. So a corpus is split in the same
way by any number of workers and after interruptions. A split by hash puts exact copies of a document into the same
split.

Worker processes import this module, so it imports neither torch, pyarrow and pydantic nor the heavier rooms.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hlat.data.tokenizers.base import TokenIdArray, Tokenizer
from hlat.runtime.terminal import NAMED

Content = str | TokenIdArray  # a text, or token ids: uint32, shape (tokens,), without an end-of-sequence token
ContentT = TypeVar("ContentT", bound=Content)

_ENCODED_DTYPE = np.dtype("<u4")  # the same bytes, and so the same hash and split, on any machine


class Vocabulary(NamedTuple):
    """The token ids that are valid in a document."""

    size: int  # ids are below this
    eos_id: int | None  # id of the end-of-sequence token; None for none

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "Vocabulary":
        return cls(tokenizer.vocab_size, tokenizer.eos_id)

    def first_unknown(self, ids: npt.NDArray[np.integer[Any]]) -> int | None:
        """Return the index of the first id outside the vocabulary; None if all are in it."""
        # Nearly always true, and takes no memory for a mask.
        if not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) < self.size:
            return None
        return int(np.flatnonzero((ids < 0) | (ids >= self.size))[0])

    def document(self, ids: npt.NDArray[np.integer[Any]]) -> TokenIdArray:
        """Return stored ids as uint32, without an end-of-sequence token at their end."""
        # Every document gets an end token when samples are made. Ids that were stored with one must give the same
        # documents, hashes and validation tail as ids stored without it.
        ends = self.eos_id is not None and len(ids) > 0 and int(ids[-1]) == self.eos_id
        return (ids[:-1] if ends else ids).astype(np.uint32)


def content_bytes(content: Content) -> bytes:
    """Encode a text as UTF-8, or tokens as little-endian uint32."""
    return content.encode() if isinstance(content, str) else content.astype(_ENCODED_DTYPE).tobytes()


def tokens_from_bytes(encoded: bytes) -> TokenIdArray:
    """Decode what ``content_bytes`` encoded; the array is read-only."""
    return np.frombuffer(encoded, dtype=_ENCODED_DTYPE)


def tokenize_contents(contents: Sequence[Content], tokenizer: Tokenizer) -> list[TokenIdArray]:
    """Tokenize texts to uint32 ids without end tokens; pass tokens through."""
    encoded = iter(tokenizer.encode_documents([content for content in contents if isinstance(content, str)]))
    return [next(encoded) if isinstance(content, str) else content for content in contents]


def text_byte_count(content: Content, tokenizer: Tokenizer) -> int:
    """Count the UTF-8 bytes of a text, or of the text that tokens stand for."""
    return len(content.encode()) if isinstance(content, str) else int(tokenizer.token_bytes[content].sum())


class BadRow(NamedTuple):
    """A row that could not be read."""

    file: int  # index of its file
    row: int  # index in the file, from 0
    line: int | None  # line number in the file, from 1; None if rows are not lines
    rows: int  # rows of the work unit up to and including this one
    reason: str  # the problem
    remedy: str  # a sentence that says how to fix it


Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")

_SPLIT_KEY = b"hlat validation split"  # keyed, so that the split is independent of other hashes of the same text


def hash_threshold(fraction: float) -> int:
    """Return the 64-bit number below which the hashes of a share ``fraction`` of documents lie."""
    return int(fraction * 2.0**64)


def tail_start(length: int, fraction: float) -> int:
    """Return the character or token at which the validation tail of a source begins."""
    return int(length * (1 - fraction))  # the cut that nanoGPT makes, so that its data can be reproduced


@dataclass(frozen=True)
class SplitRule:
    """Assigns the documents of one work unit to the splits, by hash or by position."""

    below: int = 0  # documents whose hash lies below this are validation documents; ignored if there is a boundary
    boundary: int | None = None  # characters (or tokens) of the unit before its validation tail; None for no tail

    # encoded: its ``content_bytes``; offset: characters or tokens of the unit before it
    def split_document(self, content: ContentT, encoded: bytes, offset: int) -> list[tuple[Split, ContentT]]:
        """Return (split, content) of each piece that is not empty; a tail may cut a document."""
        if self.boundary is None:
            return [(self.split_of(encoded), content)]
        cut = min(max(self.boundary - offset, 0), len(content))
        pieces: list[tuple[Split, Any]] = [("train", content[:cut]), ("validation", content[cut:])]  # of the same type
        return [piece for piece in pieces if len(piece[1])]

    def split_of(self, encoded: bytes) -> Split:
        """Return the split by the hash of ``content_bytes``; the boundary is ignored."""
        return "validation" if self.below > 0 and _split_hash(encoded) < self.below else "train"


ALL_VALIDATION = SplitRule(boundary=0)


def _split_hash(encoded: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8, key=_SPLIT_KEY).digest(), "little")


# Tokens for which the error of a mean loss is small: the losses of single tokens vary by 2 to 3 nats, so that the mean
# of 10,000 tokens is known to 0.03 nats at best, less exactly if they are of few documents.
ENOUGH_TOKENS = 10_000
ENOUGH_DOCUMENTS = 5
"""Documents of a source, over which a loss says something about the others."""


class HeldOut(NamedTuple):
    """Amount of a source's text that is kept aside for validation."""

    source: str  # name or path of the source
    documents: int  # documents kept aside
    tokens: float  # tokens kept aside
    of_tokens: float  # all tokens of the source


def describe_scarce(held: Sequence[HeldOut], fraction: float) -> str:
    """Say of which sources whole documents, as the recipe demands, are little text; empty if of none."""
    scarce = [
        each for each in held if each.of_tokens and each.tokens < ENOUGH_TOKENS and each.documents < ENOUGH_DOCUMENTS
    ]
    if not scarce:
        return ""
    # Not ``listed``: what is recorded with the data must not depend on what is asked for (-v).
    more = f" and {len(scarce) - NAMED:,} more" if len(scarce) > NAMED else ""
    named = f" ({', '.join(each.source for each in scarce[:NAMED])}{more})" if len(held) > 1 else ""
    return (
        f"{_sources(len(scarce), len(held), named)} under {ENOUGH_TOKENS:,} validation tokens; without "
        f"data.validation.by=document, the last {fraction * 100:.3g} % is held out where documents are few."
    )


def describe_tails(tails: int, sources: int, fraction: float) -> str:
    """Say of how many of the sources the tail is held out because their documents are few; empty if of none."""
    if not tails:
        return ""
    return (
        f"{_sources(tails, sources)} too few documents to hold out whole ones for validation: "
        f"{'its' if tails == 1 else 'their'} last {fraction * 100:.3g} % is held out instead."
    )


def _sources(count: int, sources: int, named: str = "") -> str:
    if sources == 1:
        return "the corpus has"
    return f"{count:,} of {sources:,} sources{named} {'has' if count == 1 else 'have'}"
