"""One line at the bottom of a terminal, redrawn several times a second by a thread; text is printed above it.

    render(width) --thread--> CR, line, erase below, CR         the cursor rests at the start of the line
    print(text)   --queue---> CR, erase below, text, newline, line

Only the thread writes. So a signal handler may print, a terminal that is stopped (Ctrl-S) stops no work, and two texts
never mix. The cursor is never hidden and rests at the beginning of the line: a process that is killed leaves a usable
terminal. When a terminal becomes narrower it breaks the line into several; erasing from the cursor on removes them all.
"""

import io
import os
import select
import shutil
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self, TextIO

from hlat.runtime.terminal_text import escape_controls

_SECONDS = 0.125  # between two drawings
_ERASE = "\r\x1b[J"
_PATIENCE = 2.0  # seconds for a terminal that takes no output

Render = Callable[[int], str]
"""Returns the line for a width in columns; colours are allowed, and nothing else that moves the cursor."""


class BottomLine:
    """A line at the bottom of a terminal, until ``close``. A context manager.

    While it is open, standard output and standard error of this process are printed above it, if they are the same
    terminal. Around a fork the thread pauses, and the child has no line.

    Args:
        stream: a terminal.
        render: draws the line; ``show`` replaces it.
    """

    def __init__(self, stream: TextIO, render: Render) -> None:
        self._stream = getattr(stream, "rich_proxied_file", stream)  # the terminal itself: controls are not escaped
        self._render, self._queue = render, SimpleQueue[str | None]()
        self._leaves = False
        self._thread: threading.Thread | None = None
        self._replaced: dict[str, _LinesAbove] = {}
        self._replace_streams()
        _open_lines.add(self)
        self._start()

    @property
    def shown(self) -> Render:
        """The function that draws the line at present."""
        return self._render

    def show(self, render: Render) -> None:
        """Draw another line from now on."""
        self._render = render
        self._queue.put("")

    def print(self, text: str) -> None:
        """Print text above the line, with control characters escaped. Signal handlers may call it."""
        self._queue.put(escape_controls(text.rstrip("\n")) + "\n")

    def close(self, *, leave: bool = False) -> None:
        """Print what is waiting, erase the line and give the streams back. Closing it twice is harmless.

        Args:
            leave: leave the line where it is: another process draws over it, or erases it.
        """
        if self not in _open_lines:
            return
        self._restore_streams()
        self._leaves = leave
        self._stop()
        _open_lines.discard(self)
        if not leave:
            self._write(_ERASE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._queue.put("")  # the first drawing is at once
        self._thread = threading.Thread(target=self._run, name="hlat-bottom-line", daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def _run(self) -> None:
        while True:
            above, ended = self._waiting()
            while not ended and not self._takes_output():  # Ctrl-S: nothing is lost until it goes on
                more, ended = self._waiting()
                above += more
            line = "" if ended and not self._leaves else self._render(max(1, _columns(self._stream) - 1))
            self._write(f"{_ERASE}{above}{line}\r" if above else f"\r{line}\x1b[J\r")
            if ended:
                return

    def _waiting(self) -> tuple[str, bool]:
        """Wait for text; return all that there is, and True if the thread is to end."""
        texts: list[str] = []
        with suppress(Empty):
            while True:
                text = self._queue.get(timeout=0 if texts else _SECONDS)
                if text is None:
                    return "".join(texts), True
                texts.append(text)
        return "".join(texts), False

    def _takes_output(self) -> bool:
        try:
            return takes_output(self._stream.fileno(), 0.0)
        except (OSError, ValueError):
            return True

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a terminal that is gone ends no run
            self._stream.write(text)
            self._stream.flush()

    def _replace_streams(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if _same_terminal(stream, self._stream):
                self._replaced[name] = _LinesAbove(self, stream)
                setattr(sys, name, self._replaced[name])

    def _restore_streams(self) -> None:
        for name, above in self._replaced.items():
            above.end()
            if getattr(sys, name) is above:  # else another stream copies it to a log, and will give it back later
                setattr(sys, name, above.stream)
        self._replaced = {}

    def _forked(self) -> None:
        """Forget the line in a forked child: it belongs to the parent."""
        self._restore_streams()
        self._queue = SimpleQueue()


class _LinesAbove(io.TextIOBase):
    """Stream whose lines are printed above a bottom line; everything else is asked of the original stream.

    Attributes:
        stream: the original stream, to which it writes once the line has been closed.
    """

    def __init__(self, line: BottomLine, stream: TextIO) -> None:
        self._line: BottomLine | None = line
        self.stream, self._rest = stream, ""

    def write(self, text: str) -> int:
        if self._line is None:
            return self.stream.write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            self._line.print("\n".join(lines) + "\n")
        return len(text)

    def end(self) -> None:
        """Print a line that was not ended; write to the original stream from now on."""
        if self._rest:
            self.write("\n")
        self._line = None

    def flush(self) -> None:
        """Do nothing while there is a bottom line: lines are printed at once, and an unfinished one cannot be."""
        if self._line is None:
            self.stream.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has an attribute
        return self.stream.encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_open_lines: "weakref.WeakSet[BottomLine]" = weakref.WeakSet()


def open_line() -> BottomLine | None:
    """Return the line of this process that is open; None if there is none."""
    return next(iter(_open_lines), None)


def erase_line() -> None:
    """Erase the bottom line of a process that ends at once (``os._exit``). For signal handlers."""
    for line in list(_open_lines):
        _open_lines.discard(line)
        with suppress(OSError, ValueError):
            os.write(line._stream.fileno(), _ERASE.encode())


def erase_rest_of(stream: TextIO) -> None:
    """Erase what another process that was killed, or is still drawing, has left at the cursor of a terminal."""
    with suppress(OSError, ValueError):
        if stream.isatty() and draws_lines():
            terminal = getattr(stream, "rich_proxied_file", stream)
            terminal.write(_ERASE)
            terminal.flush()


def draws_lines() -> bool:
    """Return True if the terminal named by TERM can be drawn on."""
    return os.environ.get("TERM") not in ("dumb", "unknown")


def takes_output(descriptor: int, seconds: float | None) -> bool:
    """Return True if a pipe or terminal takes output within so many seconds (None: without limit); files always do."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(None if seconds is None else seconds * 1000))  # errors and hang-ups are answers too


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


def _same_terminal(stream: TextIO, terminal: TextIO) -> bool:
    try:
        return stream.isatty() and os.path.sameopenfile(stream.fileno(), terminal.fileno())
    except (OSError, ValueError, AttributeError):
        return False


def _before_fork() -> None:
    for line in list(_open_lines):
        line._stop()


def _after_fork_in_parent() -> None:
    for line in list(_open_lines):
        line._start()


def _after_fork_in_child() -> None:
    for line in list(_open_lines):
        line._forked()
    _open_lines.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
