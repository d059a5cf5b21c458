"""The interface of all tokenizers: text -> token ids -> text.

Documents are always encoded as plain text: the name of a special token in a document is encoded as its characters,
never as the token, so that no document can fake an end of document. A long document is encoded in chunks where this
is proven not to change the tokens (hlat.data.tokenizers.safe_cuts), so that memory stays bounded.

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
_BATCH = 1 << 18  # characters per call of the library


class Tokenizer(ABC):
    """A tokenizer. Ids are in [0, vocab_size).

    Attributes:
        vocab_size: highest id plus 1.
        eos_token: name of the end-of-sequence token, which ends a document; None for no such token.
        eos_id: id of ``eos_token``; None for no such token.
        bos_id: id of the begin-of-sequence token that models of this tokenizer expect in front of a text. ``encode``
            does not add it. None if unknown.
        files: content by name of every file that ``transformers.AutoTokenizer`` needs.
    """

    vocab_size: int
    eos_token: str | None
    eos_id: int | None
    bos_id: int | None
    files: dict[str, bytes]

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
        """UTF-8 bytes of text per token, int64, shape (vocab_size,); 0 for special tokens.

        Summed over the tokens of a document they give the bytes of its text: exactly for byte-level and character
        tokenizers; SentencePiece models also count the space that they put in front of a text.
        """

    def encode(self, text: str) -> list[int]:
        """Encode a text.

        Raises:
            DataError: the text is not valid Unicode, or contains a character that the tokenizer cannot encode.
        """
        _check_text(text)
        return self.encode_batch([text])[0]

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a prompt for a model to continue, in the same way as ``transformers``.

        Unlike in ``encode``, names of special tokens in the text become these tokens, and a begin-of-sequence token is
        added in front if the tokenizer's post-processing adds one.

        Raises:
            DataError: the text is not valid Unicode, or contains a character that the tokenizer cannot encode.
        """
        _check_text(text)
        return self._encode_prompt(text)

    def _encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_documents(self, texts: Sequence[str]) -> list[TokenIdArray]:
        """Encode each document in chunks, so that memory is bounded; the result equals ``encode``.

        Returns:
            Tokens of each document, uint32, shape (tokens,).
        """
        arrays: list[list[TokenIdArray]] = [[] for _ in texts]
        for batch in _batches((index, chunk) for index, text in enumerate(texts) for chunk in self.chunks(text)):
            encoded = self.encode_batch([chunk for _, chunk in batch])
            for (index, _), ids in zip(batch, encoded, strict=True):
                arrays[index].append(np.array(ids, dtype=np.uint32))
        return [ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in arrays]

    def chunks(self, text: str, min_chars: int = CHUNK_CHARS) -> Iterator[str]:
        """Cut a text into chunks of about ``min_chars`` characters without changing its tokens; it may stay uncut.

        The tokens of the chunks, concatenated, are the tokens of the text.
        """
        yield text

    @cached_property
    def sha256(self) -> str:
        """Identity of the tokenizer: a hash of everything that decides the ids."""
        digest = hashlib.sha256()
        digest.update(self.files.get("tokenizer.model") or self.files["tokenizer.json"])
        digest.update(json.dumps([self.eos_id, self.vocab_size]).encode())
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files to a folder, which ``transformers.AutoTokenizer`` and ``load_saved`` can read.

        Raises:
            OSError: the disk refused the write.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_atomic(folder / name, content)
        sync_folder(folder)


def resolve_eos_token(requested: str | None, config: dict[str, Any] | None) -> str | None:
    """Return the requested end-of-sequence token; replace "auto" by the one that tokenizer_config.json names, if any.

    Raises:
        DataError: tokenizer_config.json does not give the token as text.
    """
    if requested == "auto" and config is not None and "eos_token" in config:
        return special_token_name(config, "eos_token")
    return requested


def special_token_name(config: dict[str, Any] | None, key: str) -> str | None:
    """Return the name of a special token of tokenizer_config.json, given there as a string or as an object.

    Raises:
        DataError: it is not text.
    """
    value = (config or {}).get(key)
    name = value.get("content", value) if isinstance(value, dict) else value
    if name is not None and not isinstance(name, str):
        raise DataError(f"tokenizer_config.json: {key} is {value!r}, expected the text of a token.")
    return name


def sentencepiece_byte_count(token: str) -> int:
    """Return the bytes of text of a token in SentencePiece spelling: ▁ is a space, <0x0A> is one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("▁", " ").encode())


def config_files(config: dict[str, Any], special: dict[str, str | None]) -> dict[str, bytes]:
    """Build tokenizer_config.json and special_tokens_map.json for ``transformers``; return their content by name."""
    named = {key: name for key, name in special.items() if name is not None}
    return {
        "tokenizer_config.json": _json({**config, **special}),
        "special_tokens_map.json": _json(named),
    }


def _check_text(text: str) -> None:
    """Raise DataError for lone surrogates, as Python reads bytes of a command line that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text {text[:40]!a} is not valid UTF-8: character {error.start} is "
            f"{text[error.start]!a}. Give it in UTF-8."
        ) from error


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


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
