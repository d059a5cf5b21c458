"""Content of a document: text, or token ids. Both have a length, can be sliced, and have a byte form for hashing.

Worker processes import this module, so it imports neither torch nor the heavier rooms.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from hlat.data.tokenizers import TokenIdArray, Tokenizer

Content = str | TokenIdArray
"""A text, or token ids: uint32, shape (tokens,), without an end-of-sequence token."""
ContentT = TypeVar("ContentT", str, TokenIdArray)

_ENCODED_DTYPE = np.dtype("<u4")


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
