"""The interface of all tokenizers: text -> token ids -> text.

Text is always encoded as plain text: a document that spells out a special token gets the characters of it, never
the token, so that no document can forge the end of another. A long document is encoded in pieces where that is
proven not to change the tokens (hlat.data.tokenizers.safe_cuts), so that memory stays bounded.

Worker processes import this module, so it must not import torch.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hlat.data.stores import sync_folder, write_atomic
from hlat.runtime import DataError

TokenIdArray = npt.NDArray[np.uint32]

CHUNK_CHARS = 1 << 16  # characters; memory while encoding is about 100 bytes per character
_BATCH = 1 << 18  # characters handed to the library at once


class Tokenizer(ABC):
    """One tokenizer. Ids are in [0, vocab_size).

    Attributes:
        vocab_size: one more than the highest id.
        eos_token, eos_id: what ends a document; None for nothing.
        bos_id: what the tokenizer's own model expects in front of a text, added by no ``encode``; None if unknown.
        files: name -> content of every file that ``transformers.AutoTokenizer`` needs.
    """

    vocab_size: int
    eos_token: str | None
    eos_id: int | None
    bos_id: int | None
    files: dict[str, bytes]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, special tokens neither recognised nor added."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens; bytes that are no UTF-8 become U+FFFD."""

    @property
    @abstractmethod
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes of text that each token stands for, shape (vocab_size,); 0 for special tokens.

        Over the tokens of a document they add up to the bytes of its text: exactly for byte-level and character
        tokenizers; SentencePiece counts the space that it puts in front of a text too.
        """

    def encode(self, text: str) -> list[int]:
        """The tokens of a text.

        Raises:
            DataError: the text is not valid Unicode, or holds what the tokenizer cannot encode.
        """
        _check_text(text)
        return self.encode_batch([text])[0]

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a text that a model is to continue, as ``transformers`` gives them.

        Unlike ``encode``, names of special tokens in the text are those tokens, and a begin-of-text token stands in
        front where the tokenizer's own post-processing puts one.

        Raises:
            DataError: the text is not valid Unicode, or holds what the tokenizer cannot encode.
        """
        _check_text(text)
        return self._prompt(text)

    def _prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_documents(self, texts: Sequence[str]) -> list[TokenIdArray]:
        """The tokens of each document, the same as ``encode``'s, in memory that does not grow with its length."""
        pieces: list[list[TokenIdArray]] = [[] for _ in texts]
        for batch in _batches((index, piece) for index, text in enumerate(texts) for piece in self.chunks(text)):
            encoded = self.encode_batch([piece for _, piece in batch])
            for (index, _), ids in zip(batch, encoded, strict=True):
                pieces[index].append(np.array(ids, dtype=np.uint32))
        return [ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in pieces]

    def chunks(self, text: str, min_chars: int = CHUNK_CHARS) -> Iterator[str]:
        """Pieces of about so many characters whose tokens, joined, are those of the text; it may stay whole."""
        yield text

    @cached_property
    def sha256(self) -> str:
        """Identity: a hash of everything that decides the ids."""
        digest = hashlib.sha256()
        digest.update(self.files.get("tokenizer.model") or self.files["tokenizer.json"])
        digest.update(json.dumps([self.eos_id, self.vocab_size]).encode())
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files to a folder that ``transformers.AutoTokenizer`` and ``load_saved`` read.

        Raises:
            OSError: the disk refused.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_atomic(folder / name, content)
        sync_folder(folder)


def resolve_eos_token(asked: str | None, config: dict[str, Any] | None) -> str | None:
    """The end-of-sequence token asked for; where "auto" was asked, the one that tokenizer_config.json names, if any."""
    if asked == "auto" and config is not None and "eos_token" in config:
        return special_token_name(config, "eos_token")
    return asked


def special_token_name(config: dict[str, Any] | None, key: str) -> str | None:
    """A special token of tokenizer_config.json, which writes it as a string or as an object."""
    value = (config or {}).get(key)
    name = value.get("content", value) if isinstance(value, dict) else value
    if name is not None and not isinstance(name, str):
        raise DataError(f"tokenizer_config.json: {key} is {value!r}, expected the text of a token.")
    return name


def sentencepiece_byte_count(token: str) -> int:
    """Bytes of text behind a token written the SentencePiece way: ▁ is a space, <0x0A> is one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("▁", " ").encode())


def config_files(config: dict[str, Any], special: dict[str, str | None]) -> dict[str, bytes]:
    """tokenizer_config.json and special_tokens_map.json, as transformers reads them."""
    named = {key: name for key, name in special.items() if name is not None}
    return {
        "tokenizer_config.json": _json({**config, **special}),
        "special_tokens_map.json": _json(named),
    }


def _check_text(text: str) -> None:
    """Bytes that are not UTF-8 reach us from a command line as lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text {text[:40]!a} is not valid UTF-8: character {error.start} is "
            f"{text[error.start]!a}. Give it in UTF-8."
        ) from error


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _batches(pieces: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    batch: list[tuple[int, str]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
