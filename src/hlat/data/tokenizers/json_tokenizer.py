"""Tokenizers described by a tokenizer.json: run by the ``tokenizers`` library, or one token per character."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers

from hlat.data.tokenizers.base import (
    CHUNK_CHARS,
    TokenBytes,
    TokenIdArray,
    TokenIds,
    Tokenizer,
    cut_text,
    cuts_preserve_tokens,
    sentencepiece_byte_count,
)
from hlat.data.tokenizers.tokenizer_files import (
    config_files,
    keeps_text,
    names_without_id,
    parse_tokenizer_json,
    resolve_eos_token,
    special_names,
    special_token_name,
    with_special,
    without_dropout,
)
from hlat.runtime.errors import DataError
from hlat.runtime.terminal import listed

_TRIED = "  a\n\n\tb  é 東京\r\n \U0001f600 !\u0301 \x00\u00a0 "
CHAR_PATTERN = r"[\s\S]"

# Names of these tokens in published models, for tokenizers without a tokenizer_config.json that names them.
_EOS_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>", "<|im_end|>", "[EOS]")
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<|startoftext|>", "<bos>", "[BOS]")


class JsonTokenizer(Tokenizer):
    """A tokenizer described by a ``tokenizer.json``, with its tokenizer_config.json if there is one.

    ``eos_token`` is the name of the end-of-sequence token; "auto" for the tokenizer's own; None for none. ``where``
    names the file in errors. DataError if the content is not a tokenizer, or has no such token.
    """

    _requires_eos = True  # "auto" raises DataError if the tokenizer has no end-of-sequence token

    def __init__(
        self, content: bytes, config: dict[str, Any] | None = None, eos_token: str | None = "auto", where: str = ""
    ) -> None:
        where = where or "tokenizer.json"
        self._tokenizer, self._description = parse_tokenizer_json(content, where)
        eos_token = resolve_eos_token(eos_token, config)
        content = self._mend(content, [*special_names(config), eos_token or ""], where)
        self._where = where
        self._tokenizer.no_truncation()  # a tokenizer.json may ask for it, and documents must stay whole
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self._special = {t["content"] for t in self._description.get("added_tokens") or [] if t["special"]}
        self._recognise(config, vocabulary)
        self.eos_token = self._find_eos(eos_token, vocabulary, where)
        self.eos_id = None if self.eos_token is None else vocabulary[self.eos_token]
        bos = special_token_name(config, "bos_token") or next((n for n in _BOS_NAMES if n in self._special), None)
        self.bos_id = vocabulary.get(bos) if bos else None
        model = self._description.get("model") or {}
        self.unknown_id = model.get("unk_id", vocabulary.get(model.get("unk_token") or ""))
        self._can_cut = cuts_preserve_tokens(self._description)
        special = {"eos_token": self.eos_token, "bos_token": None if self.bos_id is None else bos}
        self.files = {"tokenizer.json": content, **config_files(config, special, vocabulary)}

    def _mend(self, content: bytes, special: list[str], where: str) -> bytes:
        """Drop the dropout, and make added tokens of these names special; return the tokenizer.json."""
        steady = without_dropout(self._description)
        mended = with_special(steady, special)
        if mended is self._description:
            return content
        if steady is not self._description:  # ids would be random, and others at each start
            self.left_out = ("its BPE dropout",)
        content = json.dumps(mended, indent=2, ensure_ascii=False).encode()
        self._tokenizer, self._description = parse_tokenizer_json(content, where)
        return content

    def _recognise(self, config: dict[str, Any] | None, vocabulary: dict[str, int]) -> None:
        """Make the special tokens that the configuration names special here too, as transformers does."""
        names = special_names(config)
        if missing := names_without_id(config, vocabulary):
            shown = listed(missing)
            self.left_out = (*self.left_out, f"tokens of its configuration without an id ({shown})")
        flags = {token["content"]: token for token in self._description.get("added_tokens") or []}
        known = [name for name in names if name in vocabulary and name not in self._special]
        tokens = [{"normalized": False, **flags.get(name, {}), "content": name, "special": True} for name in known]
        self._tokenizer.add_special_tokens(
            [tokenizers.AddedToken(**{k: v for k, v in token.items() if k != "id"}) for token in tokens]
        )
        self._special.update(known)

    def encode(self, text: str) -> list[int]:
        ids = super().encode(text)
        if self.keeps_text:
            return ids
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return TokenIds(ids, text, [end for _, end in found.offsets])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text; DataError for one that the library cannot encode."""
        try:
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"{self._where}: cannot encode a text: {error}. Give a tokenizer that can encode any text, or has a "
                "token for unknown text."
            ) from error
        return [encoding.ids for encoding in encoded]

    def _encode_prompt(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = False
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=True).ids)
        finally:
            self._tokenizer.encode_special_tokens = True

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def token_name(self, index: int) -> str:
        return str(self._tokenizer.id_to_token(index))

    def chunks(self, text: str, min_chars: int = CHUNK_CHARS) -> Iterator[str]:
        return cut_text(text, min_chars) if self._can_cut else iter((text,))

    def _find_eos(self, chosen: str | None, vocabulary: dict[str, int], where: str) -> str | None:
        if chosen == "auto":
            chosen = next((name for name in _EOS_NAMES if name in self._special), None)
            if chosen is None and self._requires_eos:
                raise DataError(_eos_message(where, "does not say which token ends a document", self._special))
        elif chosen is not None and chosen not in vocabulary:
            raise DataError(_eos_message(where, f"has no token {chosen!r}", self._special))
        return chosen

    @cached_property
    def keeps_text(self) -> bool:
        if not keeps_text(self._tokenizer, self._description, self._special | {self.eos_token or ""}):
            return False
        tried = self.encode_batch([_TRIED])[0]  # what is not known to change text may do so after all
        return int(np.asarray(self.token_bytes)[tried].sum()) == len(_TRIED.encode())

    @cached_property
    def token_bytes(self) -> TokenBytes:
        decoder = json.dumps(self._description.get("decoder"), ensure_ascii=False)
        byte_level, spaced = '"ByteLevel"' in decoder, "▁" in decoder
        alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        added = {token["content"] for token in self._description.get("added_tokens") or []}
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token, index in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if token in self._special or index == self.eos_id:
                continue
            if byte_level and token not in added and alphabet.issuperset(token):
                sizes[index] = len(token)  # the token has one character per byte
            else:
                sizes[index] = sentencepiece_byte_count(token) if spaced else len(token.encode())
        return sizes.view(TokenBytes)


class CharTokenizer(JsonTokenizer):
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
        self._chars = {index: chr(point) for point, index in items}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text; DataError for a character that the vocabulary does not have."""
        return [ids.tolist() for ids in self.encode_documents(texts)]

    def encode_documents(self, texts: Sequence[str]) -> list[TokenIdArray]:
        return [self._look_up(text) for text in texts]

    def _encode_prompt(self, text: str) -> list[int]:
        try:
            return super()._encode_prompt(text)
        except Exception:  # the library's error for an unknown character
            return self.encode(text)  # raises a DataError that names the character

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._chars.get(int(index), "") for index in ids)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for index, char in self._chars.items():
            sizes[index] = len(char.encode())
        return sizes.view(TokenBytes)

    @cached_property
    def keeps_text(self) -> bool:
        """True unless the end of documents is a character of texts, too."""
        return self.eos_id not in self._chars

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


def read_json_tokenizer(
    content: bytes, config: dict[str, Any] | None, eos_token: str | None, where: str
) -> JsonTokenizer:
    """Create the tokenizer that a tokenizer.json describes; for arguments and errors see JsonTokenizer."""
    tokenizer_class = CharTokenizer if _is_char_tokenizer(content) else JsonTokenizer
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


def _eos_message(where: str, problem: str, special: set[str]) -> str:
    names = listed(sorted(special)) or "it has none"
    return (
        f"{where}: the tokenizer {problem}. Set data.tokenizer.eos_token to one of its special tokens ({names}), "
        "or to null for no token between documents."
    )
