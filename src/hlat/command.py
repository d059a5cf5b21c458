"""The command ``hlat``: what has to be settled before the program proper, and torch, are imported.

It imports what Python loads in a few milliseconds and nothing else: before ``main`` Ctrl-C gives a traceback.
"""

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main() -> None:
    """Run the command line; Ctrl-C during the seconds of imports is answered in one line too."""
    heard = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # a shell's background job does not hear Ctrl-C
    if heard:
        signal.signal(signal.SIGINT, _interrupted_early)
    from hlat.runtime.backend import ProcessorTime, set_spin_count  # noqa: PLC0415

    before = ProcessorTime.read()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before the command was started (>&-)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115  (for as long as we run)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character gets a question mark
    from hlat.runtime import EscapingStream, redact  # noqa: PLC0415

    # Whatever is printed, by us, a library or a traceback: names and texts of strangers must not steer the terminal.
    # A traceback or a warning may repeat a signed URL that a server has sent a library to.
    sys.stdout, sys.stderr = EscapingStream(sys.stdout), EscapingStream(sys.stderr, redact)
    from hlat.cli import app  # noqa: PLC0415

    set_spin_count(before, ProcessorTime.read())
    try:
        app()
    finally:
        _flush()


def _interrupted_early(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":  # of several processes one says it
        os.write(2, b"interrupted: nothing had been started\n")
    os._exit(_INTERRUPTED)


def _flush() -> None:
    """Python flushes standard output once more at exit, and complains where its reader (``| head``) has gone."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
