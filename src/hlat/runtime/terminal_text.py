"""Text of strangers on its way to a terminal or a log: what would steer the terminal is shown instead of sent.

    name, message, generated text --visible--> the same text, ESC as \\u001b
    standard output and error of the command --Shown--> terminal, pipe or file

Names of files and columns, keys of JSON, text that a model generates and messages of libraries come from outside. A
control character in them could overwrite what stands on the screen, set its title, or order text from right to left.
Shown are the control characters of ASCII and Latin-1 (C0 but for newline and tab, DEL, C1), the separators of lines and
paragraphs, what overrides or isolates the direction of text, and lone surrogates, which no encoding can write. They
are shown as JSON writes them, so that JSON remains what it was.
"""

import io
import re
import sys
from collections.abc import Callable
from typing import Any, TextIO

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_IN_NAMES = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """Text of several lines as it may go to a terminal; newlines and tabs stay."""
    return _STEERING.sub(_escape, text)


def escape_name(name: str) -> str:
    """A name, which belongs on one line, as it may go to a terminal: newlines and tabs in it are shown too."""
    return _IN_NAMES.sub(_escape, name)


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


class EscapingStream(io.TextIOBase):
    """A text stream that shows control characters instead of sending them; everything else is the original's.

    What rich draws goes past it, since its colours and movements are control characters (``rich_proxied_file`` is how
    rich asks for the stream beneath); text that is handed to rich has to be made visible before.

    Args:
        stream: the original.
        first: done to a text before.
    """

    def __init__(self, stream: TextIO, first: Callable[[str], str] | None = None) -> None:
        self._stream, self._first = stream, first

    @property
    def rich_proxied_file(self) -> TextIO:
        """The stream beneath, for rich."""
        beneath: TextIO = getattr(self._stream, "rich_proxied_file", self._stream)
        return beneath

    def write(self, text: str) -> int:
        self._stream.write(escape_controls(text if self._first is None else self._first(text)))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has an attribute, which is None in TextIOBase
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def escape_beneath_rich() -> None:
    """Have what is printed while rich draws a display made visible too.

    A display puts streams of its own in the place of standard output and error, which pass on what is printed with the
    control characters in it; when it ends, it puts back what was there.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream).__module__.startswith("rich."):
            setattr(sys, name, EscapingStream(stream))
