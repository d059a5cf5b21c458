"""Tables and sentences for a terminal of some width.

rows of texts, width --table_lines--> lines: columns as wide as their texts, long texts of the last one in several lines
sentence, width --wrapped--> lines; words of a command, width --command_lines--> lines
"""

import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence

LEFT = ("cluster", "schedule", "recompute", "layout", "model", "best for")
"""Heads of columns of words, which are aligned to the left; numbers are to the right."""

_LEAST = 10  # columns of the last cell, however narrow the terminal is


def table_lines(rows: Sequence[Sequence[str]], columns: int) -> Iterator[str]:
    """Yield the lines of a table.

    Args:
        rows: cells; the first row has the heads.
        columns: width of the terminal. Texts of the last column that are too long are broken after commas and
            spaces, and after hyphens if one of their words is too long.
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
    """Break a text after commas and spaces into pieces of a width; after hyphens too if a word is wider."""
    pieces = [""]
    for word in re.findall(r"[^, -]*[, -]?" if _widest_word(text) > width else r"[^, ]*[, ]?", text):
        if pieces[-1] and len(pieces[-1]) + len(word.rstrip()) > width:
            pieces.append("")
        pieces[-1] += word
    return [piece.rstrip() for piece in pieces]


def _widest_word(text: str) -> int:
    return max(map(len, re.split("[, ]", text)))


def command_lines(words: Sequence[str], columns: int) -> Iterator[str]:
    """Yield a command in lines that a shell takes as one.

    Args:
        words: the words of the command.
        columns: width of the terminal.
    """
    line = ""
    for word in map(shlex.quote, words):
        if line and len(line) + len(word) + 3 > columns:
            yield f"{line} \\"
            line = "    " + word
        else:
            line = f"{line} {word}" if line else word
    yield line


def wrapped(text: str, columns: int, indent: int = 0) -> list[str]:
    """Break a sentence into lines of a width, all but the first indented."""
    return textwrap.wrap(
        text, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    ) or [""]
