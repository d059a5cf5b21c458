"""Character tokenizers: one token per character, looked up by numpy instead of the ``tokenizers`` library."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from hlat.data.tokenizers.base import TokenIdArray, Tokenizer
from hlat.runtime.errors import DataError

CHAR_PATTERN = r"[\s\S]"


class CharTokenizer(Tokenizer):
    """A tokenizer with one token per character, made by ``train_char``; it encodes with numpy, not the library."""

    _requires_eos = False

    def __init__(
        self, content: bytes, config: dict[str, Any] | None = None, eos_token: str | None = "auto", where: str = ""
    ) -> None:
        super().__init__(content, config, eos_token, where)
        vocabulary = self._description["model"]["vocab"]
        if not any(len(char) == 1 for char in vocabulary):
            raise DataError(f"{self._where}: the character tokenizer has an empty vocabulary. Train it again.")
        items = sorted((ord(char), index) for char, index in vocabulary.items() if len(char) == 1)
        self._points = np.array([point for point, _ in items], dtype=np.uint32)
        self._ids = np.array([index for _, index in items], dtype=np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text; DataError for a character that the vocabulary does not have."""
        return [ids.tolist() for ids in self.encode_documents(texts)]

    def encode_documents(self, texts: Sequence[str]) -> list[TokenIdArray]:
        return [self._look_up(text) for text in texts]

    @cached_property
    def keeps_text(self) -> bool:
        """True unless the end of documents is a character of texts, too."""
        return self.eos_id not in self._ids.tolist()

    def _look_up(self, text: str) -> TokenIdArray:
        points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")  # one number per character
        indices = np.minimum(np.searchsorted(self._points, points), len(self._points) - 1)
        unknown = self._points[indices] != points
        if unknown.any():
            char = chr(points[unknown.argmax()])
            raise DataError(
                f"the character {char!r} (U+{ord(char):04X}) is not among the {len(self._points)} characters that this "
                "tokenizer was trained on. Remove it, or train with data.tokenizer.train: bpe, which encodes any text."
            )
        return self._ids[indices]


def read_json_tokenizer(content: bytes, config: dict[str, Any] | None, eos_token: str | None, where: str) -> Tokenizer:
    """Create the tokenizer that a tokenizer.json describes; for arguments and errors see Tokenizer."""
    tokenizer_class = CharTokenizer if _is_char_tokenizer(content) else Tokenizer
    return tokenizer_class(content, config, eos_token, where)


def _is_char_tokenizer(content: bytes) -> bool:
    try:
        description = json.loads(content)
        return bool(
            description["model"]["type"] == "WordLevel"
            and description["pre_tokenizer"]["pattern"] == {"Regex": CHAR_PATTERN}
            and description["normalizer"] is None
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
