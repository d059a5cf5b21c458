"""Entry point of the command ``hlat``: set up signals and output streams before the program and torch are imported.

Nothing is imported at the top but what Python or pip's script has loaded already. Ctrl-C before ``main`` prints
Python's own traceback, from Python's start or from that script, and no package can change it. A rank's waits for it.
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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # a launcher blocks it in the ranks that it starts
    hears_sigterm = signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN and not set(_LAUNCHERS) & set(os.environ)
    if hears_sigterm:
        signal.signal(signal.SIGTERM, _ended_early)
    from hlat.runtime.backend.openmp import ProcessorTime, set_spin_count  # noqa: PLC0415

    before = ProcessorTime.read()
    _open_streams()
    from hlat.cli import app  # noqa: PLC0415

    set_spin_count(before, ProcessorTime.read())
    try:
        app()
    except SystemExit as end:
        if end.code:
            raise
        _end_with_result()
    finally:
        if hears_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # no longer true: that nothing has been started


def _open_streams() -> None:
    """Replace standard output and error by streams that end no work and control no terminal."""
    for descriptor in (0, 1, 2):  # one that was closed (>&-) would be given to the next file that is opened
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(opened := os.open(os.devnull, os.O_RDWR), descriptor)
            if opened != descriptor:
                os.close(opened)
    from hlat.runtime.process import lossy_stream  # noqa: PLC0415
    from hlat.runtime.terminal import EscapingStream  # noqa: PLC0415
    from hlat.runtime.urls import redact  # noqa: PLC0415

    streams = []
    for descriptor, stream in enumerate((sys.stdout, sys.stderr), 1):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        by_line = getattr(stream, "line_buffering", True) or getattr(stream, "write_through", True)
        streams.append(lossy_stream(descriptor, encoding, by_line=by_line))
    # Names and texts from outside must not control the terminal, whoever prints them: hlat, a library or a traceback.
    # A traceback or a warning may contain a signed URL that a server has redirected a library to.
    sys.stdout, sys.stderr = EscapingStream(streams[0]), EscapingStream(streams[1], redact)


def _end_with_result() -> None:
    """End a command that has succeeded, unless its output was its result and is not whole."""
    from hlat.runtime.errors import StorageError  # noqa: PLC0415
    from hlat.runtime.process import check_result  # noqa: PLC0415

    sys.stdout.flush()
    try:
        check_result()
    except StorageError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    sys.exit(0)


def _ended_early(number: int, frame: "FrameType | None") -> None:
    """Handle Ctrl-C and SIGTERM before the command line has started anything."""
    erase_line = getattr(sys.modules.get("hlat.runtime.terminal"), "erase_line", None)
    if erase_line is not None:  # a module that is just being imported has none, and has drawn nothing
        erase_line()
    if os.environ.get("RANK", "0") == "0":  # only one of several processes prints this
        what = "interrupted" if number == signal.SIGINT else signal.Signals(number).name
        try:  # noqa: SIM105 - contextlib may not have been imported yet
            os.write(2, f"{what}: nothing had been started\n".encode())
        except OSError:  # standard error is closed, or its reader has gone
            pass
    os._exit(128 + number)  # as shells report it
