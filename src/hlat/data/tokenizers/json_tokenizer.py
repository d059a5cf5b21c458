"""Tokenizers that a tokenizer.json describes: run by the ``tokenizers`` library, or one token per character."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from hlat.data.tokenizers.base import (
    CHUNK_CHARS,
    TokenIdArray,
    Tokenizer,
    config_files,
    resolve_eos_token,
    sentencepiece_byte_count,
    special_token_name,
)
from hlat.data.tokenizers.json_tokenizer_file import parse_tokenizer_json
from hlat.data.tokenizers.safe_cuts import cut_text, cuts_preserve_tokens
from hlat.runtime import DataError

CHAR_PATTERN = r"[\s\S]"

DEFAULT_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 10**30,  # what transformers writes for "no limit"; the model's limit is in its own config
}

# Names that published models give these tokens, where no tokenizer_config.json says which they are.
_EOS_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>", "<|im_end|>", "[EOS]")
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<|startoftext|>", "<bos>", "[BOS]")


class JsonTokenizer(Tokenizer):
    """A ``tokenizer.json``.

    Args:
        content: the bytes of tokenizer.json.
        config: the tokenizer_config.json that came with it, if any.
        eos_token: name of the end-of-sequence token; "auto" for the tokenizer's own; None for none.
        where: what to call it in errors.

    Raises:
        DataError: not a tokenizer, or no such end-of-sequence token.
    """

    _must_end = True  # whether "auto" insists on an end-of-sequence token

    def __init__(
        self, content: bytes, config: dict[str, Any] | None = None, eos_token: str | None = "auto", where: str = ""
    ) -> None:
        where = where or "tokenizer.json"
        self._tokenizer, self._description = parse_tokenizer_json(content, where)
        self._where = where
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self._special = {t["content"] for t in self._description.get("added_tokens") or [] if t["special"]}
        self.eos_token = self._end(resolve_eos_token(eos_token, config), vocabulary, where)
        self.eos_id = None if self.eos_token is None else vocabulary[self.eos_token]
        bos = special_token_name(config, "bos_token") or next((n for n in _BOS_NAMES if n in self._special), None)
        self.bos_id = vocabulary.get(bos) if bos else None
        self._cuttable = cuts_preserve_tokens(self._description)
        self.files = {
            "tokenizer.json": content,
            **_companions(config, eos=self.eos_token, bos=bos),
        }

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Tokenizer.

        Raises:
            DataError: a text that the library cannot encode with this tokenizer.
        """
        try:
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library's plain one
            raise DataError(
                f"{self._where}: cannot encode a text: {error}. Give a tokenizer that knows all text, or has a token "
                "for what it does not know."
            ) from error
        return [encoding.ids for encoding in encoded]

    def _prompt(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = False
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=True).ids)
        finally:
            self._tokenizer.encode_special_tokens = True

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def chunks(self, text: str, min_chars: int = CHUNK_CHARS) -> Iterator[str]:
        """See Tokenizer."""
        return cut_text(text, min_chars) if self._cuttable else iter((text,))

    def _end(self, chosen: str | None, vocabulary: dict[str, int], where: str) -> str | None:
        if chosen == "auto":
            chosen = next((name for name in _EOS_NAMES if name in self._special), None)
            if chosen is None and self._must_end:
                raise DataError(_no_end(where, "does not say which token ends a document", self._special))
        elif chosen is not None and chosen not in vocabulary:
            raise DataError(_no_end(where, f"has no token {chosen!r}", self._special))
        return chosen

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """See Tokenizer."""
        decoder = json.dumps(self._description.get("decoder"), ensure_ascii=False)
        byte_level, spaced = '"ByteLevel"' in decoder, "▁" in decoder
        alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token, index in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if token in self._special:
                continue
            if byte_level and alphabet.issuperset(token):
                sizes[index] = len(token)  # spelled with one character per byte
            else:
                sizes[index] = sentencepiece_byte_count(token) if spaced else len(token.encode())
        return sizes


class CharTokenizer(JsonTokenizer):
    """One token per character: the tokenizer.json that ``train_char`` makes, read with numpy instead of the library."""

    _must_end = False

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
        self._chars = {index: chr(point) for point, index in items}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Tokenizer.

        Raises:
            DataError: a character that the vocabulary does not have.
        """
        return [ids.tolist() for ids in self.encode_documents(texts)]

    def encode_documents(self, texts: Sequence[str]) -> list[TokenIdArray]:
        """See Tokenizer."""
        return [self._look_up(text) for text in texts]

    def _prompt(self, text: str) -> list[int]:
        try:
            return super()._prompt(text)
        except Exception:  # the library's plain one, at a character that it does not have
            return self.encode(text)  # which says it by name

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        return "".join(self._chars.get(int(index), "") for index in ids)

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """See Tokenizer."""
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for index, char in self._chars.items():
            sizes[index] = len(char.encode())
        return sizes

    def _look_up(self, text: str) -> TokenIdArray:
        points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        places = np.minimum(np.searchsorted(self._points, points), len(self._points) - 1)
        unknown = self._points[places] != points
        if unknown.any():
            char = chr(points[unknown.argmax()])
            raise DataError(
                f"the character {char!r} (U+{ord(char):04X}) is not among the {len(self._points)} characters that this "
                "tokenizer was made from. Leave it out, or train with data.tokenizer.train: bpe, which knows all text."
            )
        return self._ids[places]


def read_json_tokenizer(
    content: bytes, config: dict[str, Any] | None, eos_token: str | None, where: str
) -> JsonTokenizer:
    """The tokenizer that a tokenizer.json describes; arguments as JsonTokenizer's."""
    kind = CharTokenizer if _is_char(content) else JsonTokenizer
    return kind(content, config, eos_token, where)


def _is_char(content: bytes) -> bool:
    try:
        description = json.loads(content)
        return bool(
            description["model"]["type"] == "WordLevel"
            and description["pre_tokenizer"]["pattern"] == {"Regex": CHAR_PATTERN}
            and description["normalizer"] is None
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _companions(config: dict[str, Any] | None, *, eos: str | None, bos: str | None) -> dict[str, bytes]:
    """The files beside tokenizer.json: what came with it, with the end-of-sequence token that is in use."""
    return config_files(config or DEFAULT_CONFIG, {"eos_token": eos, "bos_token": bos})


def _no_end(where: str, what: str, special: set[str]) -> str:
    names = ", ".join(sorted(special)) or "it has none"
    return (
        f"{where}: the tokenizer {what}. Set data.tokenizer.eos_token to one of its special tokens ({names}), "
        "or to null to put nothing between documents."
    )
