"""Fields of a status line, fitted to the width of a terminal: the least important ones are left out, nothing wraps.

fields in the order of display, each with its rank --fit--> one line of at most so many columns
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len, set_cell_size

from hlat.runtime.stage_line import writes_unicode


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


def bar(share: float, width: int, stream: TextIO | None = None) -> str:
    """Return a bar of which a share is filled."""
    full, empty = ("━", "─") if writes_unicode(stream) else ("#", "-")
    filled = round(min(1.0, max(0.0, share)) * width)
    return full * filled + empty * (width - filled)


def has_colour() -> bool:
    """Return True unless the environment says NO_COLOR (https://no-color.org)."""
    return not os.environ.get("NO_COLOR")
