"""Train a tokenizer on a corpus: byte-level BPE on a uniform sample, or one token per character.

Both give an ordinary tokenizer.json. The sample consists of the chunks of text with the smallest hashes, as many as
fit. So it depends on the texts alone, every chunk has the same chance, and memory is bounded by the sample.
"""

import hashlib
import heapq
import json
from collections.abc import Callable, Iterable, Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from hlat.data.tokenizers.bpe import BYTES, build_bpe
from hlat.data.tokenizers.bpe_process import train_bpe_in_process
from hlat.data.tokenizers.json_tokenizer import CHAR_PATTERN, CharTokenizer, JsonTokenizer
from hlat.data.tokenizers.safe_cuts import cut_text
from hlat.data.tokenizers.transformers_config import DEFAULT_CONFIG
from hlat.runtime.errors import DataError

EOS = "<|endoftext|>"

_CHUNK = 1 << 15  # characters; a long document is sampled in chunks, not completely or not at all
_KEY = b"hlat tokenizer sample"


def sample_texts(texts: Iterable[str], max_bytes: int, distinct: bool = False) -> list[str]:
    """Draw a uniform sample of chunks of a corpus, in the order of the corpus; the complete corpus if it fits.

    Args:
        texts: the corpus.
        max_bytes: maximum size of the sample in UTF-8 bytes; at least one chunk is returned.
        distinct: skip chunks that are in the sample already, for corpora of which copies are dropped.
    """
    kept: list[tuple[int, int, int, str]] = []  # a heap with the largest hash on top: (-hash, -position, bytes, text)
    ranks: set[int] = set()
    total = 0
    for position, chunk in enumerate(_chunks(texts)):
        encoded = chunk.encode()
        rank = int.from_bytes(hashlib.blake2b(encoded, digest_size=8, key=_KEY).digest(), "little")
        if distinct and rank in ranks:
            continue
        ranks.add(rank)
        heapq.heappush(kept, (-rank, -position, len(encoded), chunk))
        total += len(encoded)
        while total > max_bytes and len(kept) > 1:
            removed = heapq.heappop(kept)
            ranks.discard(-removed[0])
            total -= removed[2]
    return [chunk for _, _, _, chunk in sorted(kept, key=lambda entry: -entry[1])]


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    eos_token: str | None = "auto",
    progress: Callable[[str, int, int], None] | None = None,
) -> JsonTokenizer:
    """Train a byte-level BPE tokenizer, which encodes any text and decodes it to exactly the same text.

    Args:
        texts: texts to train on.
        vocab_size: total number of tokens: 256 bytes, the end-of-sequence token, merges. A small corpus can give fewer.
        eos_token: name of the end-of-sequence token; "auto" is <|endoftext|>, None for none.
        progress: called with the stage, the merges done and those in total; it is then trained in a process of its own,
            which can be interrupted. None trains in this process.

    Raises:
        DataError: the vocabulary is too small for the 256 bytes and the end-of-sequence token.
    """
    name = EOS if eos_token == "auto" else eos_token
    special = [] if name is None else [name]
    if vocab_size < BYTES + len(special):
        raise DataError(
            f"data.tokenizer.vocab_size = {vocab_size}: a byte-level tokenizer has 256 bytes"
            f"{' and an end-of-sequence token' if special else ''}; set it to at least {BYTES + len(special)}"
        )
    content = (
        build_bpe(texts, vocab_size, special)
        if progress is None
        else train_bpe_in_process(texts, vocab_size, special, progress)
    )
    return JsonTokenizer(content, {**DEFAULT_CONFIG, "eos_token": name}, name)


def train_char(alphabet: Iterable[str], eos_token: str | None = "auto") -> CharTokenizer:
    """Make a tokenizer with one token per character, ordered by code point; the end-of-sequence token comes last.

    Args:
        alphabet: all characters, in any order.
        eos_token: name of the end-of-sequence token; "auto" and None for none.

    Raises:
        DataError: the name of the end-of-sequence token is a single character.
    """
    chars = sorted(set(alphabet))
    name = None if eos_token == "auto" else eos_token
    tokenizer = tokenizers.Tokenizer(models.WordLevel({char: index for index, char in enumerate(chars)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(CHAR_PATTERN), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if name is not None:
        if len(name) == 1:
            raise DataError(f"data.tokenizer.eos_token = {name!r}: a single character is text; set a longer name")
        tokenizer.add_special_tokens([name])
    description = json.loads(tokenizer.to_str())
    content = json.dumps(description, indent=2, ensure_ascii=False).encode()
    return CharTokenizer(content, {**DEFAULT_CONFIG, "eos_token": name}, name)


def _chunks(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from cut_text(text, _CHUNK)
