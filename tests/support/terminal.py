"""A terminal as a witness: a command in a pseudo-terminal, and the screen that a person would see.

``Screen`` knows what hlat may send: text, newline, carriage return, colours and "erase from here on". Anything else,
such as hiding the cursor, is an error. It breaks long lines at its width, and breaks them anew when it is resized, as
tmux, VTE and iTerm2 do; the cursor stays with its character.
"""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic, sleep

from rich.cells import cell_len

_PATIENCE = 1200.0  # seconds after which a test gives up
_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
_CUT = re.compile(r"\x1b(\[[0-9;?]*)?$")


class Screen:
    """The text that a terminal of a width shows, as lines of text that are not broken yet.

    Attributes:
        lines: the text since the beginning.
        widest: columns of the widest line over which a later one was drawn, or that was erased.
        drawn: every line that was drawn and then replaced.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines, self._line, self._column = [""], 0, 0
        self.widest, self.drawn = 0, list[str]()

    def feed(self, text: str) -> None:
        """Show what a program writes."""
        text, position = text.replace("\r\n", "\n"), 0  # a terminal driver's newline
        while position < len(text):
            found = _CONTROL.match(text, position)
            if found is not None:
                self._control(found[1], found[2])
                position = found.end()
                continue
            self._character(text[position])
            position += 1

    def _character(self, character: str) -> None:
        line = self.lines[self._line]
        if character == "\r":
            if self._column == len(line) and line:
                self.widest, self.drawn = max(self.widest, cell_len(line)), [*self.drawn, line]
            self._column -= self._column % self.columns
        elif character == "\n":
            row_end = (self._column // self.columns + 1) * self.columns
            if row_end < len(line):
                self._column = row_end
            else:
                self._line, self._column = self._line + 1, 0
                self.lines += [""] * (self._line + 1 - len(self.lines))
        else:
            assert character >= " ", f"an unexpected control character: {character!r}"
            self.lines[self._line] = line[: self._column].ljust(self._column) + character + line[self._column + 1 :]
            self._column += 1

    def _control(self, parameters: str, kind: str) -> None:
        if kind == "m":
            return
        assert (kind, parameters) == ("J", ""), f"an unexpected control: CSI {parameters} {kind}"
        self.lines[self._line :] = [self.lines[self._line][: self._column]]

    @property
    def text(self) -> str:
        """The lines that are not empty."""
        return "\n".join(line.rstrip() for line in self.lines if line.strip())

    @property
    def cursor_is_free(self) -> bool:
        """True if the cursor is at the beginning of an empty line, with nothing below it."""
        return self._column == 0 and not "".join(self.lines[self._line :]).strip()


def set_columns(descriptor: int, columns: int) -> None:
    """Give a pseudo-terminal another width."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


class TerminalCommand:
    """The real command ``hlat`` in a pseudo-terminal of its own session. A context manager that leaves no process.

    Args:
        arguments: arguments of the command.
        columns: width of the terminal.
        environment: variables to set besides those of this process.
        folder: working folder.
    """

    def __init__(
        self, *arguments: str | Path, columns: int, environment: Mapping[str, str] | None = None, folder: Path
    ) -> None:
        self.screen = Screen(columns)
        self._parent, child = pty.openpty()
        set_columns(self._parent, columns)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hlat", *map(str, arguments)],
            stdin=child,
            stdout=child,
            stderr=child,
            cwd=folder,
            env={**os.environ, "TERM": "xterm-256color", **(environment or {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  (Ctrl-C is for its session)
        )
        os.close(child)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def press(self, keys: str) -> None:
        """Type keys."""
        os.write(self._parent, keys.encode())

    def wait_for(self, condition: Callable[[Screen], bool]) -> None:
        """Wait until the screen, now or in the past, meets a condition; it fails if the command ends before."""
        end = monotonic() + _PATIENCE
        while not condition(self.screen):
            assert self._thread.is_alive() or condition(self.screen), self.screen.text
            assert monotonic() < end, self.screen.text
            sleep(0.02)

    def wait(self) -> int:
        """Wait until the command has ended and its output is read; return its exit code."""
        code = self.process.wait(_PATIENCE)
        self._thread.join()
        return code

    def _read(self) -> None:
        rest = b""
        while True:
            try:
                data = os.read(self._parent, 1 << 16)
            except OSError:  # how Linux says that nobody has the terminal open any more
                return
            if not data:
                return
            rest += data
            text = rest.decode(errors="ignore")
            cut = text.endswith("\r") or _CUT.search(text) or rest.decode(errors="replace").endswith("\ufffd")
            if cut and self._more():  # cut within a newline, a control or a character
                continue
            rest = b""
            self.screen.feed(text)

    def _more(self) -> bool:
        """True if more output comes soon: a carriage return may be the last for a while."""
        return bool(select.select([self._parent], [], [], 0.05)[0])

    def __enter__(self) -> "TerminalCommand":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._thread.join()
        os.close(self._parent)
