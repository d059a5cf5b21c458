"""Entry point of the command ``hlat``: set up signals and output streams before the program and torch are imported.

Nothing is imported at the top but what Python or pip's script has loaded already. Ctrl-C before ``main`` prints
Python's own traceback, from Python's start or from that script, and no package can change it.
"""

import os
import signal
import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the import
if TYPE_CHECKING:
    from types import FrameType

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main() -> None:
    """Run the command line. Ctrl-C during the seconds of imports ends with one line instead of a traceback."""
    handled = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # a shell's background job ignores Ctrl-C
    if handled:
        signal.signal(signal.SIGINT, _interrupted_early)
    from hlat.runtime.backend import ProcessorTime, set_spin_count  # noqa: PLC0415

    before = ProcessorTime.read()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed before the command was started (>&-)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # characters that the terminal cannot encode become "?"
    from hlat.runtime import EscapingStream, redact  # noqa: PLC0415

    # Names and texts from outside must not control the terminal, whoever prints them: hlat, a library or a traceback.
    # A traceback or a warning may contain a signed URL that a server has redirected a library to.
    sys.stdout, sys.stderr = EscapingStream(sys.stdout), EscapingStream(sys.stderr, redact)
    from hlat.cli import app  # noqa: PLC0415

    set_spin_count(before, ProcessorTime.read())
    try:
        app()
    finally:
        _flush()


def _interrupted_early(number: int, frame: "FrameType | None") -> None:
    """Handle Ctrl-C before the command line has started."""
    erase_line = getattr(sys.modules.get("hlat.runtime.bottom_line"), "erase_line", None)
    if erase_line is not None:  # a module that is just being imported has none, and has drawn nothing
        erase_line()
    if os.environ.get("RANK", "0") == "0":  # only one of several processes prints this
        os.write(2, b"interrupted: nothing had been started\n")
    os._exit(_INTERRUPTED)


def _flush() -> None:
    """Flush standard output.

    Python flushes it once more at exit, and complains if its reader (``| head``) has gone.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
