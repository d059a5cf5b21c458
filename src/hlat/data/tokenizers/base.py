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

import numpy as np
import numpy.typing as npt

from hlat.data.stores.atomic_files import sync_folder, write_atomic
from hlat.runtime.errors import DataError

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
        unknown_id: id of the token for text that the vocabulary does not have; None for no such token.
        files: content by name of every file that ``transformers.AutoTokenizer`` needs.
        left_out: what of the given files is not used, a phrase each, such as "its BPE dropout".
        not_exported: why a model with this tokenizer cannot be exported, and what would work; empty if it can.
        ids_changed: why earlier versions gave other ids, and the file of which they took the hash; None if not.
    """

    vocab_size: int
    eos_token: str | None
    eos_id: int | None
    bos_id: int | None
    files: dict[str, bytes]
    left_out: Sequence[str] = ()
    not_exported: str = ""
    ids_changed: tuple[str, bytes] | None = None
    _more_identity: bytes = b""

    unknown_id: int | None = None

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

        Summed over the tokens of ``encode`` they give the bytes of its text (hlat.data.tokenizers.text_bytes). Over
        stored tokens that holds where ``keeps_text``.
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
        return self._hash(self.files.get("tokenizer.model") or self.files["tokenizer.json"], self._more_identity)

    @cached_property
    def earlier_sha256(self) -> str | None:
        """Identity that earlier versions gave to the same files, for which they had other ids; None if the same."""
        return None if self.ids_changed is None else self._hash(self.ids_changed[1])

    def _hash(self, *parts: bytes) -> str:
        numbers = json.dumps([self.eos_id, self.vocab_size]).encode()
        return hashlib.sha256(b"".join((*parts, numbers))).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files to a folder, which ``transformers.AutoTokenizer`` and ``load_saved`` can read.

        Raises:
            OSError: the disk refused the write.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_atomic(folder / name, content)
        sync_folder(folder)


def sentencepiece_byte_count(token: str) -> int:
    """Return the bytes of text of a token in SentencePiece spelling: ▁ is a space, <0x0A> is one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("▁", " ").encode())


def _check_text(text: str) -> None:
    """Raise DataError for lone surrogates, as Python reads bytes of a command line that are not UTF-8."""
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
