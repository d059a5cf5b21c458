"""Train a tokenizer on a corpus: byte-level BPE on a uniform sample, or one token per character.

    texts --chunks with the smallest hashes--> sample --train_bpe | train_char--> tokenizer.json

    parent --(a line of JSON, then the texts)--> python -m hlat.data.tokenizers.training --stdout--> tokenizer.json
           <---- stderr: {"stage": "Compute merges", "current": 17, "total": 4096} ----

The sample consists of as many chunks as fit. So it depends on the texts alone, every chunk has the same chance, and
memory is bounded by the sample.

BPE is trained in a process of its own, because the library trains for minutes in one call, during which Python handles
no signal. It is started as a separate program instead of forked, because the parent may have threads of torch. It is
killed when the parent leaves; if the parent is killed, it ends at its next line of progress.
"""

import hashlib
import heapq
import json
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import IO

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from hlat.data.tokenizers.base import OWN_PATTERN, cut_text
from hlat.data.tokenizers.json_tokenizer import CHAR_PATTERN, CharTokenizer, JsonTokenizer
from hlat.data.tokenizers.tokenizer_files import DEFAULT_CONFIG
from hlat.runtime.errors import DataError

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
    for position, chunk in enumerate(_chunks(texts)):
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
) -> JsonTokenizer:
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
    content = (
        build_bpe(texts, vocab_size, special)
        if progress is None
        else train_bpe_in_process(texts, vocab_size, special, progress)
    )
    return JsonTokenizer(content, {**DEFAULT_CONFIG, "eos_token": name}, name)


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
    description = json.loads(tokenizer.to_str())
    content = json.dumps(description, indent=2, ensure_ascii=False).encode()
    return CharTokenizer(content, {**DEFAULT_CONFIG, "eos_token": name}, name)


def _chunks(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from cut_text(text, _SAMPLE_CHUNK)


STAGE = "train tokenizer"  # stage of its progress reports, which count merges; the total is 0 until merging begins

_PROGRESS_INTERVAL = 0.2  # seconds between two reports
_TEXT_LENGTH = struct.Struct("<Q")
_MERGING = "Compute merges"
_ERROR_LINES = 20  # lines of an error that are shown


def train_bpe_in_process(
    texts: Iterable[str], vocab_size: int, special: Sequence[str], progress: Callable[[str, int, int], None]
) -> bytes:
    """Train byte-level BPE in another process; return its tokenizer.json, the same as that of ``build_bpe``.

    ``progress`` is called on this thread. DataError if the process was killed, perhaps because memory ran out.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "hlat.data.tokenizers.training"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches only the parent, which ends this process itself
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    state, output, most = _Progress(), list[bytes](), vocab_size - BYTES - len(special)
    readers = [
        threading.Thread(target=lambda: output.append(process.stdout.read()), daemon=True),  # type: ignore[union-attr]
        threading.Thread(target=state.read, args=(process.stderr,), daemon=True),
    ]
    settings = json.dumps({"vocab_size": vocab_size, "special": list(special)}).encode() + b"\n"
    writer = threading.Thread(target=_send, args=(process.stdin, settings, texts), daemon=True)
    try:
        for thread in (*readers, writer):
            thread.start()
        running = True
        while running:
            readers[0].join(_PROGRESS_INTERVAL)  # in short waits, so that Ctrl-C is handled between them
            running = any(thread.is_alive() for thread in readers)
            done, total = state.merges
            progress(STAGE, done, min(total, most))  # the library's total is the size of the vocabulary
        code = process.wait()
    finally:
        process.kill()
        process.wait()
        writer.join()
        for thread in readers:
            thread.join()
        for stream in (process.stdout, process.stderr):
            stream.close()
    if code:
        raise _ended(code, state.other_lines)
    return output[0]


class _Progress:
    """Reads the child's reports: merges so far, and lines that are no reports."""

    def __init__(self) -> None:
        self.merges = (0, 0)
        self.other_lines: deque[str] = deque(maxlen=_ERROR_LINES)

    def read(self, stream: IO[bytes]) -> None:
        for line in stream:
            try:
                report = json.loads(line)
                if report["stage"] == _MERGING:
                    self.merges = (int(report["current"]), int(report["total"]))
            except (ValueError, KeyError, TypeError):
                self.other_lines.append(line.decode("utf-8", "replace").rstrip())


def _send(stream: IO[bytes], settings: bytes, texts: Iterable[str]) -> None:
    with suppress(BrokenPipeError), stream:  # a child that has ended is reported by its exit code
        stream.write(settings)
        for text in texts:
            encoded = text.encode()
            stream.write(_TEXT_LENGTH.pack(len(encoded)))
            stream.write(encoded)


def _ended(code: int, lines: Iterable[str]) -> Exception:
    if code < 0:
        return DataError(
            f"the process that trains the tokenizer was killed by signal {-code}, perhaps because memory ran out. Run "
            "again, with a smaller data.tokenizer.train_bytes if it happens again."
        )
    return RuntimeError("training the tokenizer failed:\n" + "\n".join(lines))


def _received(stream: IO[bytes]) -> Iterator[str]:
    while len(head := stream.read(_TEXT_LENGTH.size)) == _TEXT_LENGTH.size:
        yield stream.read(_TEXT_LENGTH.unpack(head)[0]).decode()


def _train_in_this_process() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    content = build_bpe(_received(sys.stdin.buffer), settings["vocab_size"], settings["special"], report=True)
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _train_in_this_process()
