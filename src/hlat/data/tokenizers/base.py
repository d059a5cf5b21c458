"""The interface of all tokenizers: text -> token ids -> text, in chunks, with the bytes that tokens stand for.

    text --cut where it is proven safe--> chunks --encode--> TokenIds, with the bytes of the text under each token
    TokenIds      --TokenBytes[ids]--> bytes of the text, exact
    ids of shards --TokenBytes[ids]--> bytes of their spelling

Documents are always encoded as plain text: the name of a special token in a document is encoded as its characters,
never as the token, so that no document can fake an end of document.

**Cuts.** A long document is encoded in chunks where this cannot change the tokens, so that memory stays bounded. A
byte-level BPE tokenizer first splits the text with a regular expression; merges never cross the splits. A cut changes
nothing if the expression has the same matches on the two halves as on the full text. Cuts are made before a single
space or line break between two ASCII letters, ``a|_b``. For the expressions listed below, such a cut is proven safe:

1. No alternative can match an ASCII letter followed by white space, so in the full text a match ends at the cut.
2. Left half: the match that ends with the letter before the cut is a greedy run of letters (or a contraction), which
   ends at a non-letter or at the end of the text. There are only two look-aheads. The one for the last white space
   of a run begins with white space, so it is never tried at that letter. "No letter follows" is true at the cut and
   at the end of the text.
3. Right half: it starts with exactly one white-space character and a letter, and no expression looks behind, so the
   matches from the cut on depend only on the text after it.

The tests check this on random texts for every listed expression. For any other tokenizer, texts are not cut.

**Bytes.** A tokenizer that normalizes, or drops what it does not know, spells less or more than the text: full-width
letters have three bytes, and the token one. The sum over the tokens of ``encode`` is that of the text for every
tokenizer. Sums over stored ids are scaled by the bytes of the text in the manifest (hlat.data.prepared).

Worker processes import this module, so it must not import torch.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hlat.runtime.errors import DataError
from hlat.runtime.storage.local_files import sync_to_disk, write_atomic

# The expression of the tokenizers that hlat trains: contractions; words with their combining marks and the space
# before them; single digits (so that a number of any length has one segmentation); punctuation with the line ends
# after it; line ends with the white space before them; other white space.
OWN_PATTERN = (
    r"'(?i:s|t|d|m|ll|re|ve)(?!\p{L})"
    r"| ?\p{L}[\p{L}\p{M}]*"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
# Published expressions, from their tokenizer.json: Llama 3 (up to three digits) and Qwen 2 (single digits).
_PUBLISHED_PATTERNS = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
]
QWEN2_PATTERN = _PUBLISHED_PATTERNS[1]
_PROVEN_PATTERNS = frozenset([OWN_PATTERN, *_PUBLISHED_PATTERNS])

_CUT = re.compile(r"(?<=[A-Za-z])[ \n](?=[A-Za-z])")


def cut_text(text: str, min_chars: int, places: re.Pattern[str] = _CUT, dropped: int = 0) -> Iterator[str]:
    """Cut a text before white space between two ASCII letters, into chunks of at least ``min_chars`` characters.

    Without such a place a chunk can be much longer, and the last one shorter. ``min_chars`` is at least 1. Of other
    ``places``, ``dropped`` characters belong to no chunk.
    """
    start = 0
    while len(text) - start > min_chars and (cut := places.search(text, start + min_chars)):
        yield text[start : cut.start()]
        start = cut.start() + dropped
    yield text[start:] if start else text


def cuts_preserve_tokens(description: dict[str, Any]) -> bool:
    """Return True if the tokenizer of a parsed tokenizer.json gives chunks the tokens of the uncut text."""
    model = description.get("model") or {}
    return (
        description.get("normalizer") is None
        and model.get("type") == "BPE"
        and not model.get("dropout")
        # Other added tokens are found in a text before it is split.
        and all(token["special"] for token in description.get("added_tokens", []))
        and _has_proven_split(description.get("pre_tokenizer"))
    )


def _has_proven_split(pre_tokenizer: dict[str, Any] | None) -> bool:
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True  # GPT-2's expression, built into the library
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern in _PROVEN_PATTERNS
    return False


class TokenIds(list[int]):
    """Token ids of one text, with the bytes of the text under each; ``ends`` are ends of tokens, in characters."""

    def __init__(self, ids: Sequence[int], text: str, ends: Sequence[int]) -> None:
        super().__init__(ids)
        sizes = np.fromiter((len(char.encode()) for char in text), np.int64, len(text))
        before = np.concatenate([[0], np.cumsum(sizes)])
        last = np.maximum.accumulate([*ends[:-1], len(text)]) if ids else np.empty(0, np.int64)
        # From the end of the token before to the end of each token, int64. The last one has all that follows, so that
        # their sum is that of the text.
        self.text_bytes: npt.NDArray[np.int64] = np.diff(before[last], prepend=0)


class TokenBytes(np.ndarray[Any, np.dtype[np.int64]]):
    """Table of bytes per token id, int64, shape (vocabulary,); for the ids of a text the bytes of that text."""

    def __getitem__(self, index: Any) -> Any:
        return index.text_bytes if isinstance(index, TokenIds) else super().__getitem__(index)


TokenIdArray = npt.NDArray[np.uint32]

CHUNK_CHARS = 1 << 16  # characters; memory while encoding is about 100 bytes per character
_BATCH = 1 << 18  # characters per call of the library


class Tokenizer(ABC):
    """Base of all tokenizers. Ids are in [0, vocab_size)."""

    vocab_size: int  # highest id plus 1
    eos_token: str | None  # name of the end-of-sequence token, which ends a document; None for no such token
    eos_id: int | None  # id of ``eos_token``; None for no such token
    # Id of the begin-of-sequence token that models of this tokenizer expect in front of a text. ``encode`` does not add
    # it. None if unknown.
    bos_id: int | None
    files: dict[str, bytes]  # content by name of every file that ``transformers.AutoTokenizer`` needs
    left_out: Sequence[str] = ()  # what of the given files is not used, a phrase each, such as "its BPE dropout"
    _more_identity: bytes = b""

    unknown_id: int | None = None  # id of the token for text that the vocabulary does not have; None for no such token

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text; special tokens are neither recognised nor added."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, without special tokens; bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def token_name(self, index: int) -> str:
        """Return the name of a token, which of a special token is its text in a prompt, such as "</s>"."""

    @property
    @abstractmethod
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes of the spelling of each token, int64, shape (vocab_size,); 0 for special tokens.

        Summed over the tokens of ``encode`` they give the bytes of its text; over stored tokens, where ``keeps_text``.
        """

    @property
    @abstractmethod
    def keeps_text(self) -> bool:
        """True if the spellings of the tokens of any text are the text: byte-level and character tokenizers."""

    def encode(self, text: str) -> list[int]:
        """Encode a text.

        Raises:
            DataError: the text is not valid Unicode, or contains a character that the tokenizer cannot encode.
        """
        _check_text(text)
        return self.encode_batch([text])[0]

    def encode_by_origin(self, text: str) -> list[int]:
        """Encode a text with the library that made the tokenizer, if ``encode`` uses another."""
        return self.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a prompt for a model to continue, in the same way as ``transformers``.

        Unlike in ``encode``, names of special tokens in the text become these tokens, and a begin-of-sequence token is
        added in front if the tokenizer's post-processing adds one. Errors are those of ``encode``.
        """
        _check_text(text)
        return self._encode_prompt(text)

    def _encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_documents(self, texts: Sequence[str]) -> list[TokenIdArray]:
        """Encode each document in chunks, so that memory is bounded; the result equals ``encode``.

        Each result is uint32, shape (tokens,).
        """
        arrays: list[list[TokenIdArray]] = [[] for _ in texts]
        for batch in _batches((index, chunk) for index, text in enumerate(texts) for chunk in self.chunks(text)):
            encoded = self.encode_batch([chunk for _, chunk in batch])
            for (index, _), ids in zip(batch, encoded, strict=True):
                arrays[index].append(np.array(ids, dtype=np.uint32))
        return [ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in arrays]

    def chunks(self, text: str, min_chars: int = CHUNK_CHARS) -> Iterator[str]:
        """Cut a text into chunks of about ``min_chars`` characters; it may stay uncut.

        The tokens of the chunks, concatenated, are the tokens of the text.
        """
        yield text

    @cached_property
    def sha256(self) -> str:
        """Identity of the tokenizer: a hash of everything that decides the ids."""
        file = self.files.get("tokenizer.model") or self.files["tokenizer.json"]
        numbers = json.dumps([self.eos_id, self.vocab_size]).encode()
        return hashlib.sha256(b"".join((file, self._more_identity, numbers))).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files for ``transformers.AutoTokenizer`` and ``load_saved``; OSError if the disk refuses."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_atomic(folder / name, content)
        sync_to_disk(folder)


def sentencepiece_byte_count(token: str) -> int:
    """Return the bytes of text of a token in SentencePiece spelling: ▁ is a space, <0x0A> is one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("▁", " ").encode())


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text {text[:40]!a} is not valid UTF-8: character {error.start} is "
            f"{text[error.start]!a}. Give it in UTF-8."
        ) from error


def _batches(chunks: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    batch: list[tuple[int, str]] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk[1])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
