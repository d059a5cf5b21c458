"""Train a tokenizer on a corpus: byte-level BPE on a uniform sample, or one token per character.

    texts --chunks with the smallest hashes--> sample --train_bpe | train_char--> tokenizer.json

    parent --lists of texts--> helper process --> tokenizer.json
           <---- (17, 4096): merges so far, and in total; the texts that it has taken are counted before

The sample consists of as many chunks as fit. So it depends on the texts alone, every chunk has the same chance, and
memory is bounded by the sample.

BPE is trained in a process of its own, because the library trains for minutes in one call, during which Python handles
no signal. It is a new interpreter instead of a fork, because the parent may have threads of torch.
"""

import hashlib
import heapq
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import IO

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from hlat.data.tokenizers.base import Tokenizer, in_batches
from hlat.data.tokenizers.char_tokenizer import CHAR_PATTERN, CharTokenizer
from hlat.data.tokenizers.cutting import OWN_PATTERN, cut_text
from hlat.data.tokenizers.tokenizer_files import DEFAULT_CONFIG
from hlat.runtime.errors import DataError
from hlat.runtime.helper_process import Channel, PeerEnded, start_program

BYTES = 256


def build_bpe(texts: Iterable[str], vocab_size: int, special: Sequence[str], *, report: bool = False) -> bytes:
    """Train byte-level BPE and return its tokenizer.json; ``special`` tokens come first.

    Nothing can interrupt it (``train_bpe_in_process``). With ``report``, progress goes to stderr, a JSON object per
    line.
    """
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
        special_tokens=list(special),
        # All 256 bytes, so that any text can be encoded.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    if report and hasattr(trainer, "progress_format"):  # since tokenizers 0.23
        trainer.progress_format, trainer.show_progress = "json", True
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True).encode()


EOS = "<|endoftext|>"

_SAMPLE_CHUNK = 1 << 15  # characters; a long document is sampled in chunks, not completely or not at all
_SAMPLE_KEY = b"hlat tokenizer sample"


def sample_texts(texts: Iterable[str], max_bytes: int, distinct: bool = False) -> list[str]:
    """Draw a uniform sample of chunks of at most ``max_bytes`` UTF-8 bytes, in the order of the corpus."""
    kept: list[tuple[int, int, int, str]] = []  # a heap with the largest hash on top: (-hash, -position, bytes, text)
    ranks: set[int] = set()
    total = 0
    for position, chunk in enumerate(chunk for text in texts for chunk in cut_text(text, _SAMPLE_CHUNK)):
        encoded = chunk.encode()
        rank = int.from_bytes(hashlib.blake2b(encoded, digest_size=8, key=_SAMPLE_KEY).digest(), "little")
        if distinct and rank in ranks:  # for a corpus of which copies are dropped
            continue
        ranks.add(rank)
        heapq.heappush(kept, (-rank, -position, len(encoded), chunk))
        total += len(encoded)
        # The smallest hashes stay: every chunk has the same chance, in one pass.
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
) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which encodes any text and decodes it to exactly the same text.

    ``vocab_size`` counts 256 bytes, the end-of-sequence token and merges; a small corpus can give fewer. ``eos_token``
    "auto" is <|endoftext|>, None is none. With ``progress`` it is trained in a process of its own, which can be
    interrupted; it is called with the stage, the merges done and those in total.

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
    if progress is None:
        content = build_bpe(texts, vocab_size, special)
    else:
        content = train_bpe_in_process(texts, vocab_size, special, progress)
    return Tokenizer(content, {**DEFAULT_CONFIG, "eos_token": name}, name)


def train_char(alphabet: Iterable[str], eos_token: str | None = "auto") -> CharTokenizer:
    """Make a tokenizer with one token per character, ordered by code point; the end-of-sequence token comes last.

    "auto" and None: no end-of-sequence token. DataError if its name is a single character.
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
    return CharTokenizer(tokenizer.to_str(pretty=True).encode(), {**DEFAULT_CONFIG, "eos_token": name}, name)


STAGE = "train tokenizer"  # stage of its progress reports, which count merges; the total is 0 until merging begins
READING = "count words"  # the stage before, which counts characters

_PROGRESS_INTERVAL = 0.2  # seconds between two reports
_MERGING = "Compute merges"
_SENT_CHARACTERS = 1 << 20  # of texts in one message


def train_bpe_in_process(
    texts: Iterable[str], vocab_size: int, special: Sequence[str], progress: Callable[[str, int, int], None]
) -> bytes:
    """Train byte-level BPE in another process; return its tokenizer.json, the same as that of ``build_bpe``.

    ``progress`` is called on this thread. DataError if the process was killed, perhaps because memory ran out.
    """
    most, merges, taken = vocab_size - BYTES - len(special), (0, 0), [0]
    texts = list(texts)
    characters = sum(map(len, texts))
    name = "the process that trains the tokenizer"
    process = start_program(f"{__name__}:train_here", vocab_size, special, name=name)
    writer = threading.Thread(target=_send, args=(process.channel, texts, taken), daemon=True)
    writer.start()
    try:
        while not isinstance(found := process.receive(_PROGRESS_INTERVAL), bytes):  # Ctrl-C is handled in between
            merges = found or merges
            if not merges[1] and taken[0] < characters:
                progress(READING, taken[0], characters)
            else:
                progress(STAGE, merges[0], min(merges[1], most))  # the library's total is the size of the vocabulary
        return found
    except PeerEnded as end:
        remedy = "Run again, with a smaller data.tokenizer.train_bytes if it happens again."
        raise DataError(f"{end}, perhaps because memory ran out. {remedy}") from None
    finally:
        process.kill()
        writer.join()


def _send(channel: Channel, texts: Iterable[str], taken: list[int]) -> None:
    """Send lists of texts, then an empty one; ``taken`` counts their characters."""
    with suppress(PeerEnded):  # which the parent's main thread tells
        for together in in_batches(texts, _SENT_CHARACTERS, len):
            channel.send(together)
            taken[0] += sum(map(len, together))
        channel.send([])


def train_here(channel: Channel, vocab_size: int, special: Sequence[str]) -> None:
    """Train on the texts of the parent, and send the merges so far, then tokenizer.json; the work of a helper."""
    # The library prints its reports on standard error. They are for the parent, everything else is for the user.
    reading, writing = os.pipe()
    user = os.fdopen(os.dup(2), "wb", buffering=0)
    os.dup2(writing, 2)
    os.close(writing)
    reporter = threading.Thread(target=_report, args=(channel, os.fdopen(reading, "rb"), user), daemon=True)
    reporter.start()
    content = build_bpe(_received(channel), vocab_size, special, report=True)
    os.dup2(user.fileno(), 2)  # no writer is left, so the reports end, and the last one is sent before the result
    reporter.join()
    channel.send(content)


def _report(channel: Channel, lines: IO[bytes], user: IO[bytes]) -> None:
    told = 0.0
    for line in lines:
        try:
            report = json.loads(line)
            current, total, is_merging = int(report["current"]), int(report["total"]), report["stage"] == _MERGING
        except (ValueError, KeyError, TypeError):
            with suppress(OSError):
                user.write(line)
            continue
        if is_merging and (current == total or time.monotonic() - told > _PROGRESS_INTERVAL):
            told = time.monotonic()
            with suppress(PeerEnded):
                channel.send((current, total))


def _received(channel: Channel) -> Iterator[str]:
    while texts := channel.receive()[0]:
        yield from texts
