"""Content of a document: text, or token ids. Both have a length, can be sliced, and have a byte form for hashing.

Worker processes import this module, so it imports neither torch nor the heavier rooms.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hlat.data.tokenizers.base import TokenIdArray, Tokenizer

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
