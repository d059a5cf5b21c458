"""Fields of a status line, fitted to the width of a terminal: the least important ones are left out, nothing wraps.

fields in the order of display, each with its rank --fit--> one line of at most so many columns
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len, set_cell_size

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ASCII_FRAMES = "|/-\\"
_PER_SECOND = 8.0


@dataclass(frozen=True)
class Field:
    """A part of a status line.

    Attributes:
        text: what is shown.
        rank: place in the order of importance; 0 is the most important.
        style: parameters of the terminal's colour sequence (SGR), such as "32"; empty for none.
    """

    text: str
    rank: int
    style: str = ""


def fit(fields: Sequence[Field], width: int, *, colour: bool = False) -> str:
    """Join fields by two spaces; leave out the least important until they fit, and cut the last one that is left."""
    kept = [field for field in fields if field.text]
    while len(kept) > 1 and _columns(kept) > width:
        kept.remove(max(kept, key=lambda field: field.rank))
    if _columns(kept) > width:
        return set_cell_size(kept[0].text, width).rstrip()
    return "  ".join(f"\x1b[{f.style}m{f.text}\x1b[0m" if colour and f.style else f.text for f in kept)


def _columns(fields: Sequence[Field]) -> int:
    return sum(cell_len(field.text) for field in fields) + 2 * max(0, len(fields) - 1)


def spinner(stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> str:
    """Return the frame of the spinner at this moment: a sign that the program is alive."""
    frames = _FRAMES if writes_unicode(stream) else _ASCII_FRAMES
    return frames[int(clock() * _PER_SECOND) % len(frames)]


def bar(share: float, width: int, stream: TextIO | None = None) -> str:
    """Return a bar of which a share is filled."""
    full, empty = ("━", "─") if writes_unicode(stream) else ("#", "-")
    filled = round(min(1.0, max(0.0, share)) * width)
    return full * filled + empty * (width - filled)


def has_colour() -> bool:
    """Return True unless the environment says NO_COLOR (https://no-color.org)."""
    return not os.environ.get("NO_COLOR")


def writes_unicode(stream: TextIO | None = None) -> bool:
    """Return True if a stream, or standard output, can encode the characters of bar and spinner."""
    encoding = getattr(stream or sys.stdout, "encoding", None) or "utf-8"
    try:
        "━⠋".encode(encoding)
    except (UnicodeError, LookupError):
        return False
    return True
