"""Tables and sentences for a terminal of some width.

rows of texts, width --table_lines--> lines: columns as wide as their texts, long texts of the last one in several lines
"""

import textwrap
from collections.abc import Iterator, Sequence

LEFT = ("cluster", "schedule", "recompute", "layout", "model", "best for")
"""Heads of columns of words, which are aligned to the left; numbers are to the right."""

_LEAST = 16  # columns of the last cell, however narrow the terminal is


def table_lines(rows: Sequence[Sequence[str]], columns: int) -> Iterator[str]:
    """Yield the lines of a table.

    Args:
        rows: cells; the first row has the heads.
        columns: width of the terminal. Texts of the last column that are too long are broken after commas.
    """
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    before = sum(widths[:-1]) + len(widths) - 1
    last = max(_LEAST, columns - before)
    for row in rows:
        cells = [
            text.ljust(width) if head in LEFT else text.rjust(width)
            for head, text, width in zip(rows[0][:-1], row[:-1], widths[:-1], strict=True)
        ]
        if rows[0][-1] not in LEFT:
            yield " ".join([*cells, row[-1].rjust(widths[-1])]).rstrip()
            continue
        first, *more = _broken(row[-1], last)
        yield " ".join([*cells, first]).rstrip()
        yield from (" " * before + text for text in more)


def _broken(text: str, width: int) -> list[str]:
    """Break a text after commas into pieces of a width."""
    pieces = [""]
    for word in text.replace(",", ",\n").split("\n"):
        if pieces[-1] and len(pieces[-1]) + len(word) > width:
            pieces.append("")
        pieces[-1] += word
    return pieces


def wrapped(text: str, columns: int, indent: int = 0) -> list[str]:
    """Break a sentence into lines of a width, all but the first indented."""
    return textwrap.wrap(
        text, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    ) or [""]
