"""Line for a terminal about what a program is doing: a spinner, a name and the seconds since it began."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ASCII_FRAMES = "|/-\\"
_PER_SECOND = 8.0


class StageLine:
    """A stage, such as "importing PyTorch", as the line that ``BottomLine`` draws.

    Args:
        name: what is being done.
        clock: seconds, monotonic.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock, self._begin = name, clock, clock()

    def __call__(self, width: int) -> str:
        """Return the line for a width in columns; the seconds are left out first, then the end of the name."""
        from rich.cells import cell_len, set_cell_size  # noqa: PLC0415  (24 ms, at the start of every command)

        line = f"{spinner()} {self._name}"
        timed = f"{line}  {self._clock() - self._begin:.0f} s"
        if cell_len(timed) <= width:
            return timed
        return line if cell_len(line) <= width else set_cell_size(line, width).rstrip()


def spinner(stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> str:
    """Return the frame of the spinner at this moment: a sign that the program is alive."""
    frames = _FRAMES if writes_unicode(stream) else _ASCII_FRAMES
    return frames[int(clock() * _PER_SECOND) % len(frames)]


def writes_unicode(stream: TextIO | None = None) -> bool:
    """Return True if a stream, or standard output, can encode the characters of bar and spinner."""
    encoding = getattr(stream or sys.stdout, "encoding", None) or "utf-8"
    try:
        "━⠋".encode(encoding)
    except (UnicodeError, LookupError):
        return False
    return True
