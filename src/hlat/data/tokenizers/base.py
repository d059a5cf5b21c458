"""Tokenizers described by a tokenizer.json: text -> token ids -> text, with the bytes that tokens stand for.

    text --chunks (hlat.data.tokenizers.cutting)--> encode --> TokenIds, with the bytes of the text under each token
    TokenIds      --TokenBytes[ids]--> bytes of the text, exact
    ids of shards --TokenBytes[ids]--> bytes of their spelling

Documents are always encoded as plain text: the name of a special token in a document is encoded as its characters,
never as the token, so that no document can fake an end of document.

**Bytes.** A tokenizer that normalizes, or drops what it does not know, spells less or more than the text: full-width
letters have three bytes, and the token one. The sum over the tokens of ``encode`` is that of the text for every
tokenizer. Sums over stored ids are scaled by the bytes of the text in the manifest (hlat.data.prepared).

Worker processes import this module, so it must not import torch.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import tokenizers

from hlat.data.tokenizers.cutting import cut_text, cuts_preserve_tokens
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
from hlat.runtime.storage.local_files import sync_to_disk, write_atomic
from hlat.runtime.terminal import listed

_TRIED = "  a\n\n\tb  é 東京\r\n \U0001f600 !\u0301 \x00\u00a0 "
# Names of these tokens in published models, for tokenizers without a tokenizer_config.json that names them.
_EOS_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>", "<|im_end|>", "[EOS]")
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<|startoftext|>", "<bos>", "[BOS]")


class TokenIds(list[int]):
    """Token ids of one text, with the bytes of the text under each; ``ends`` are ends of tokens, in characters."""

    def __init__(self, ids: Sequence[int], text: str, ends: Sequence[int]) -> None:
        super().__init__(ids)
        sizes = np.fromiter((len(char.encode()) for char in text), np.int64, len(text))
        before = np.concatenate([[0], np.cumsum(sizes)])
        last = np.maximum.accumulate([*ends[:-1], len(text)]) if ids else np.empty(0, np.int64)
        # From the end of the token before to the end of each token, int64. The last one has all that follows, so that
        # their sum is that of the text.
        self.text_bytes: npt.NDArray[np.int64] = np.diff(before[last], prepend=0)


class TokenBytes(np.ndarray[Any, np.dtype[np.int64]]):
    """Table of bytes per token id, int64, shape (vocabulary,); for the ids of a text the bytes of that text."""

    def __getitem__(self, index: Any) -> Any:
        return index.text_bytes if isinstance(index, TokenIds) else super().__getitem__(index)


TokenIdArray = npt.NDArray[np.uint32]
T = TypeVar("T")

CHUNK_CHARS = 1 << 16  # characters; memory while encoding is about 100 bytes per character
_BATCH = 1 << 18  # characters per call of the library


class Tokenizer:
    """A tokenizer described by a ``tokenizer.json``, with its tokenizer_config.json if there is one.

    Ids are in [0, vocab_size). ``eos_token`` is the name of the end-of-sequence token; "auto" for the tokenizer's own;
    None for none. ``where`` names the file in errors. DataError if the content is no tokenizer, or has no such token.
    """

    vocab_size: int  # highest id plus 1
    eos_token: str | None  # name of the end-of-sequence token, which ends a document; None for no such token
    eos_id: int | None  # id of ``eos_token``; None for no such token
    # Id of the begin-of-sequence token that models of this tokenizer expect in front of a text. ``encode`` does not add
    # it. None if unknown.
    bos_id: int | None
    files: dict[str, bytes]  # content by name of every file that ``transformers.AutoTokenizer`` needs
    left_out: Sequence[str] = ()  # what of the given files is not used, a phrase each, such as "its BPE dropout"
    unknown_id: int | None  # id of the token for text that the vocabulary does not have; None for no such token
    _more_identity = b""  # what decides the ids besides the file that was given
    _requires_eos = True  # "auto" raises DataError if the tokenizer has no end-of-sequence token

    def __init__(
        self, content: bytes, config: dict[str, Any] | None = None, eos_token: str | None = "auto", where: str = ""
    ) -> None:
        self._where = where or "tokenizer.json"
        self._tokenizer, self._description = parse_tokenizer_json(content, self._where)
        eos_token = resolve_eos_token(eos_token, config)
        content = self._mend(content, [*special_names(config), eos_token or ""])
        self._tokenizer.no_truncation()  # a tokenizer.json may ask for it, and documents must stay whole
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self._special = {t["content"] for t in self._description.get("added_tokens") or [] if t["special"]}
        self._recognise(config, vocabulary)
        self.eos_token = self._find_eos(eos_token, vocabulary)
        self.eos_id = None if self.eos_token is None else vocabulary[self.eos_token]
        bos = special_token_name(config, "bos_token") or next((n for n in _BOS_NAMES if n in self._special), None)
        self.bos_id = vocabulary.get(bos) if bos else None
        model = self._description.get("model") or {}
        self.unknown_id = model.get("unk_id", vocabulary.get(model.get("unk_token") or ""))
        self._can_cut = cuts_preserve_tokens(self._description)
        special = {"eos_token": self.eos_token, "bos_token": None if self.bos_id is None else bos}
        self.files = {"tokenizer.json": content, **config_files(config, special, vocabulary)}

    def _mend(self, content: bytes, special: list[str]) -> bytes:
        """Drop the dropout, and make added tokens of these names special; return the tokenizer.json."""
        steady = without_dropout(self._description)
        mended = with_special(steady, special)
        if mended is self._description:
            return content
        if steady is not self._description:  # ids would be random, and others at each start
            self.left_out = ("its BPE dropout",)
        content = json.dumps(mended, indent=2, ensure_ascii=False).encode()
        self._tokenizer, self._description = parse_tokenizer_json(content, self._where)
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
        """Encode a text.

        Raises:
            DataError: the text is not valid Unicode, or contains a character that the tokenizer cannot encode.
        """
        _check_text(text)
        ids = self.encode_batch([text])[0]
        if self.keeps_text:
            return ids
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return TokenIds(ids, text, [end for _, end in found.offsets])

    def encode_by_origin(self, text: str) -> list[int]:
        """Encode a text with the library that made the tokenizer, if ``encode`` uses another."""
        return self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text; special tokens are neither recognised nor added. DataError if the library cannot."""
        try:
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"{self._where}: cannot encode a text: {error}. Give a tokenizer that can encode any text, or has a "
                "token for unknown text."
            ) from error
        return [encoding.ids for encoding in encoded]

    def encode_documents(self, texts: Sequence[str]) -> list[TokenIdArray]:
        """Encode each document in chunks, so that memory is bounded; the result equals ``encode``.

        Each result is uint32, shape (tokens,).
        """
        arrays: list[list[TokenIdArray]] = [[] for _ in texts]
        chunks = ((index, chunk) for index, text in enumerate(texts) for chunk in self.chunks(text))
        for batch in in_batches(chunks, _BATCH, lambda each: len(each[1])):
            encoded = self.encode_batch([chunk for _, chunk in batch])
            for (index, _), ids in zip(batch, encoded, strict=True):
                arrays[index].append(np.array(ids, dtype=np.uint32))
        return [ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in arrays]

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a prompt for a model to continue, in the same way as ``transformers``.

        Unlike in ``encode``, names of special tokens in the text become these tokens, and a begin-of-sequence token is
        added in front if the tokenizer's post-processing adds one. Errors are those of ``encode``.
        """
        _check_text(text)
        self._tokenizer.encode_special_tokens = False
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=True).ids)
        except Exception:  # the library's, of a text without ids
            return self.encode(text)  # raises a DataError that says what is wrong
        finally:
            self._tokenizer.encode_special_tokens = True

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def token_name(self, index: int) -> str:
        """Return the name of a token, which of a special token is its text in a prompt, such as "</s>"."""
        return str(self._tokenizer.id_to_token(index))

    def chunks(self, text: str, min_chars: int = CHUNK_CHARS) -> Iterator[str]:
        """Cut a text into chunks of about ``min_chars`` characters; it may stay uncut.

        The tokens of the chunks, concatenated, are the tokens of the text.
        """
        return cut_text(text, min_chars) if self._can_cut else iter((text,))

    def _find_eos(self, chosen: str | None, vocabulary: dict[str, int]) -> str | None:
        if chosen == "auto":
            chosen = next((name for name in _EOS_NAMES if name in self._special), None)
            if chosen is None and self._requires_eos:
                raise self._wrong_eos("does not say which token ends a document")
        elif chosen is not None and chosen not in vocabulary:
            raise self._wrong_eos(f"has no token {chosen!r}")
        return chosen

    def _wrong_eos(self, problem: str) -> DataError:
        names = listed(sorted(self._special)) or "it has none"
        return DataError(
            f"{self._where}: the tokenizer {problem}. Set data.tokenizer.eos_token to one of its special tokens "
            f"({names}), or to null for no token between documents."
        )

    @cached_property
    def keeps_text(self) -> bool:
        """True if the spellings of the tokens of any text are the text: byte-level and character tokenizers."""
        if not keeps_text(self._tokenizer, self._description, self._special | {self.eos_token or ""}):
            return False
        tried = self.encode_batch([_TRIED])[0]  # what is not known to change text may do so after all
        return int(np.asarray(self.token_bytes)[tried].sum()) == len(_TRIED.encode())

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """UTF-8 bytes of the spelling of each token, int64, shape (vocab_size,); 0 for special tokens.

        Summed over the tokens of ``encode`` they give the bytes of its text; over stored tokens, where ``keeps_text``.
        """
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

    @cached_property
    def sha256(self) -> str:
        """Identity of the tokenizer: a hash of everything that decides the ids."""
        file = self.files.get("tokenizer.model") or self.files["tokenizer.json"]
        numbers = json.dumps([self.eos_id, self.vocab_size]).encode()
        return hashlib.sha256(b"".join((file, self._more_identity, numbers))).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files for ``transformers.AutoTokenizer`` and ``load_saved``; OSError if the disk refuses."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_atomic(folder / name, content)
        sync_to_disk(folder)


def sentencepiece_byte_count(token: str) -> int:
    """Return the bytes of text of a token in SentencePiece spelling: ▁ is a space, <0x0A> is one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("▁", " ").encode())


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text {text[:40]!a} is not valid UTF-8: character {error.start} is "
            f"{text[error.start]!a}. Give it in UTF-8."
        ) from error


def in_batches(items: Iterable[T], least: int, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield items together, as soon as their sizes add up to ``least``; the last of them may be fewer."""
    batch, size = list[T](), 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= least:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
