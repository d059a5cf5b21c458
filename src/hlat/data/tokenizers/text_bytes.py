"""Bytes of text that tokens stand for: by a table of the vocabulary, or exactly where the text is at hand.

    text --encode--> TokenIds, with the bytes of the text under each token --TokenBytes[ids]--> exact
    ids of shards ----------------------------------------------------------TokenBytes[ids]--> of their spelling

A tokenizer that normalizes, or drops what it does not know, spells less or more than the text: full-width letters have
three bytes, and the token one. The sum over the tokens of ``encode`` is that of the text for every tokenizer. Sums over
stored ids are scaled by the bytes of the text in the manifest (hlat.data.prepared).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class TokenIds(list[int]):
    """Token ids of one text.

    Args:
        ids: the ids.
        text: the text.
        ends: index of the character in the text behind the last one of each token.

    Attributes:
        text_bytes: UTF-8 bytes of the text from the end of the token before to the end of each token, int64; the last
            one has all that follows, so that their sum is that of the text.
    """

    def __init__(self, ids: Sequence[int], text: str, ends: Sequence[int]) -> None:
        super().__init__(ids)
        sizes = np.fromiter((len(char.encode()) for char in text), np.int64, len(text))
        before = np.concatenate([[0], np.cumsum(sizes)])
        last = np.maximum.accumulate([*ends[:-1], len(text)]) if ids else np.empty(0, np.int64)
        self.text_bytes: npt.NDArray[np.int64] = np.diff(before[last], prepend=0)


class TokenBytes(np.ndarray[Any, np.dtype[np.int64]]):
    """Table of bytes per token id, int64, shape (vocabulary,); for the ids of a text the bytes of that text."""

    def __getitem__(self, index: Any) -> Any:
        """Return the bytes of ids, or those of the text that the ids were made from."""
        return index.text_bytes if isinstance(index, TokenIds) else super().__getitem__(index)
