"""A corpus becomes a tokenizer: byte-level BPE on an evenly spread sample, or one token per character.

Both end as an ordinary tokenizer.json. The sample is the pieces of text with the smallest hashes, as many as fit:
which text is in it depends on the texts alone, every piece has the same chance, and memory is bounded by the sample.
"""

import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from hlat.data.tokenizers.json_tokenizer import CHAR_PATTERN, DEFAULT_CONFIG, CharTokenizer, JsonTokenizer
from hlat.data.tokenizers.safe_cuts import OWN_PATTERN, cut_text
from hlat.runtime import DataError

EOS = "<|endoftext|>"

_BYTES = 256
_PIECE = 1 << 15  # characters: a long document is sampled in pieces, not all or nothing
_KEY = b"hlat tokenizer sample"


def sample_texts(texts: Iterable[str], at_most: int, distinct: bool = False) -> list[str]:
    """An evenly spread sample of at most so many UTF-8 bytes, in the order of the corpus; all of it if it fits.

    Args:
        texts: the corpus.
        at_most: bytes of the sample.
        distinct: whether what was sampled already is passed over, as where copies of documents are dropped.
    """
    kept: list[tuple[int, int, int, str]] = []  # a heap with the largest hash on top: (-hash, -place, bytes, text)
    ranks: set[int] = set()
    total = 0
    for place, piece in enumerate(_pieces(texts)):
        encoded = piece.encode()
        rank = int.from_bytes(hashlib.blake2b(encoded, digest_size=8, key=_KEY).digest(), "little")
        if distinct and rank in ranks:
            continue
        ranks.add(rank)
        heapq.heappush(kept, (-rank, -place, len(encoded), piece))
        total += len(encoded)
        while total > at_most and len(kept) > 1:
            gone = heapq.heappop(kept)
            ranks.discard(-gone[0])
            total -= gone[2]
    return [piece for _, _, _, piece in sorted(kept, key=lambda entry: -entry[1])]


def train_bpe(texts: Iterable[str], vocab_size: int, eos_token: str | None = "auto") -> JsonTokenizer:
    """A byte-level BPE tokenizer: it knows all text, and decoding gives back exactly what was encoded.

    Args:
        texts: what to train on.
        vocab_size: tokens in all: 256 bytes, the end-of-sequence token, merges. A small corpus may yield fewer.
        eos_token: name of the end-of-sequence token; "auto" is <|endoftext|>, None for none.

    Raises:
        DataError: a vocabulary too small for the bytes.
    """
    name = EOS if eos_token == "auto" else eos_token
    special = [] if name is None else [name]
    if vocab_size < _BYTES + len(special):
        raise DataError(
            f"data.tokenizer.vocab_size = {vocab_size}: a byte-level tokenizer has 256 bytes"
            f"{' and an end-of-sequence token' if special else ''}; ask for at least {_BYTES + len(special)}"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(OWN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return JsonTokenizer(tokenizer.to_str(pretty=True).encode(), {**DEFAULT_CONFIG, "eos_token": name}, name)


def train_char(alphabet: Iterable[str], eos_token: str | None = "auto") -> CharTokenizer:
    """One token per character, numbered by code point; the end-of-sequence token, if asked for by name, comes last.

    Args:
        alphabet: every character there is, in any order.
        eos_token: name of the end-of-sequence token; "auto" and None are none.
    """
    chars = sorted(set(alphabet))
    name = None if eos_token == "auto" else eos_token
    tokenizer = tokenizers.Tokenizer(models.WordLevel({char: index for index, char in enumerate(chars)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(CHAR_PATTERN), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if name is not None:
        if len(name) == 1:
            raise DataError(f"data.tokenizer.eos_token = {name!r}: a single character is text; give a longer name")
        tokenizer.add_special_tokens([name])
    description = json.loads(tokenizer.to_str())
    content = json.dumps(description, indent=2, ensure_ascii=False).encode()
    return CharTokenizer(content, {**DEFAULT_CONFIG, "eos_token": name}, name)


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from cut_text(text, _PIECE)
