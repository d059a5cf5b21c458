"""Training of a tokenizer in a process of its own, which shows its progress and can be interrupted.

    parent --(a line of JSON, then the texts)--> python -m hlat.data.tokenizers.bpe_process --stdout--> tokenizer.json
           <---- stderr: {"stage": "Compute merges", "current": 17, "total": 4096} ----

The library trains for minutes in one call, during which Python handles no signal. It is started as a separate program
instead of forked, because the parent may have threads of torch. It is killed when the parent leaves; if the parent is
killed, it ends at its next line of progress.
"""

import json
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import IO

from hlat.data.tokenizers.bpe import BYTES, build_bpe
from hlat.runtime.errors import DataError

STAGE = "train tokenizer"
"""Stage of its progress reports, which count merges; the total is 0 until merging begins."""

_EVERY = 0.2  # seconds between two reports
_LENGTH = struct.Struct("<Q")
_MERGING = "Compute merges"
_TAIL = 20  # lines of an error that are shown


def train_bpe_in_process(
    texts: Iterable[str], vocab_size: int, special: Sequence[str], progress: Callable[[str, int, int], None]
) -> bytes:
    """Train byte-level BPE in another process; return its tokenizer.json, the same as that of ``build_bpe``.

    Args:
        texts: texts to train on.
        vocab_size: total number of tokens.
        special: special tokens, which come first.
        progress: called with the stage, the merges done, and those in total; on this thread.

    Raises:
        DataError: the process was killed, perhaps because memory ran out.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "hlat.data.tokenizers.bpe_process"],
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
            readers[0].join(_EVERY)
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
        self.other_lines: deque[str] = deque(maxlen=_TAIL)

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
            stream.write(_LENGTH.pack(len(encoded)))
            stream.write(encoded)


def _ended(code: int, lines: Iterable[str]) -> Exception:
    if code < 0:
        return DataError(
            f"the process that trains the tokenizer was killed by signal {-code}, perhaps because memory ran out. Run "
            "again, with a smaller data.tokenizer.train_bytes if it happens again."
        )
    return RuntimeError("training the tokenizer failed:\n" + "\n".join(lines))


def _received(stream: IO[bytes]) -> Iterator[str]:
    while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
        yield stream.read(_LENGTH.unpack(head)[0]).decode()


def main() -> None:
    """Train one tokenizer for the parent."""
    settings = json.loads(sys.stdin.buffer.readline())
    content = build_bpe(_received(sys.stdin.buffer), settings["vocab_size"], settings["special"], report=True)
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
