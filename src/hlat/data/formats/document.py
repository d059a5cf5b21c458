"""What a document is: text, or tokens already. Both have a length, can be cut, and are bytes where they are hashed.

Worker processes import this module, so it brings neither torch nor the heavier rooms along.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from hlat.data.tokenizers import TokenIdArray, Tokenizer

Content = str | TokenIdArray
"""A text, or tokens: uint32, shape (tokens,), without an end token."""
ContentT = TypeVar("ContentT", str, TokenIdArray)

_ON_THE_WAY = np.dtype("<u4")


def content_bytes(content: Content) -> bytes:
    """A text in UTF-8; tokens as little-endian uint32."""
    return content.encode() if isinstance(content, str) else content.astype(_ON_THE_WAY).tobytes()


def tokens_from_bytes(encoded: bytes) -> TokenIdArray:
    """The tokens that ``as_bytes`` was given, read-only."""
    return np.frombuffer(encoded, dtype=_ON_THE_WAY)


def tokenize_contents(contents: Sequence[Content], tokenizer: Tokenizer) -> list[TokenIdArray]:
    """The tokens of each document, without end tokens.

    Raises:
        DataError: a text that the tokenizer cannot encode.
    """
    encoded = iter(tokenizer.encode_documents([content for content in contents if isinstance(content, str)]))
    return [next(encoded) if isinstance(content, str) else content for content in contents]


def text_byte_count(content: Content, tokenizer: Tokenizer) -> int:
    """Bytes of text in UTF-8 that a document is, or that its tokens stand for."""
    return len(content.encode()) if isinstance(content, str) else int(tokenizer.token_bytes[content].sum())
