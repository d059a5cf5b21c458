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

_LAUNCHERS = ("HLAT_LAUNCHER_PID", "TORCHELASTIC_RUN_ID")
"""Variables of processes whose launcher ends them by SIGTERM, and says why."""


def main() -> None:
    """Run the command line. Ctrl-C or SIGTERM during the seconds of imports ends with one line."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background job ignores Ctrl-C
        signal.signal(signal.SIGINT, _ended_early)
    hears_sigterm = signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN and not set(_LAUNCHERS) & set(os.environ)
    if hears_sigterm:
        signal.signal(signal.SIGTERM, _ended_early)
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
        if hears_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # no longer true: that nothing has been started
        _flush()


def _ended_early(number: int, frame: "FrameType | None") -> None:
    """Handle Ctrl-C and SIGTERM before the command line has started anything."""
    erase_line = getattr(sys.modules.get("hlat.runtime.bottom_line"), "erase_line", None)
    if erase_line is not None:  # a module that is just being imported has none, and has drawn nothing
        erase_line()
    if os.environ.get("RANK", "0") == "0":  # only one of several processes prints this
        what = "interrupted" if number == signal.SIGINT else signal.Signals(number).name
        try:  # noqa: SIM105 - contextlib may not have been imported yet
            os.write(2, f"{what}: nothing had been started\n".encode())
        except OSError:  # standard error is closed, or its reader has gone
            pass
    os._exit(128 + number)  # as shells report it


def _flush() -> None:
    """Flush standard output.

    Python flushes it once more at exit, and complains if its reader (``| head``) has gone.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
