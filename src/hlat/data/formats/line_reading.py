"""A stream of bytes -> its lines, of which no more than ``LONGEST_LINE`` bytes are ever held.

Lines are cut at b"\\n" alone. A longer line comes out as its beginning; the rest of it is read only if lines after it
are asked for, so that whoever refuses it does not wait for what it decompresses to.
"""

from collections.abc import Iterator
from typing import NamedTuple

from hlat.data.formats.decompression import Stream

MAX_LINE_BYTES = 1 << 28
"""Bytes of a line with its end. A Chinese document of 100 MB takes 200 MB where JSON spells its characters \\uXXXX."""
_STEP = 1 << 16


class TextLine(NamedTuple):
    """A line that is not blank.

    Attributes:
        number: from 1, blank ones counted.
        offset: the byte of the stream at which it begins.
        content: with its end; the first ``LONGEST_LINE`` + 1 bytes where it is longer.
    """

    number: int
    offset: int
    content: bytes

    @property
    def end(self) -> int:
        """The byte of the stream after ``content``."""
        return self.offset + len(self.content)

    @property
    def is_too_long(self) -> bool:
        """Tell whether ``content`` is the beginning of it only."""
        return len(self.content) > MAX_LINE_BYTES


def iter_lines(stream: Stream, number: int = 0, offset: int = 0) -> Iterator[TextLine]:
    """The lines of a stream that are not blank.

    Args:
        stream: read from where it is.
        number: lines before that.
        offset: bytes before that.
    """
    while content := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if content.isspace() and len(content) <= MAX_LINE_BYTES:
            blank, skipped = _skip_blank(stream)
            number, offset = number + blank, offset + len(content) + skipped
            continue
        yield TextLine(number, offset, content)
        offset += len(content)
        rest = len(content) > MAX_LINE_BYTES and not content.endswith(b"\n")
        del content  # before anything more is read: it may be large
        if rest:
            offset += skip_line(stream)


def skip_line(stream: Stream) -> int:
    """Read to the end of a line; returns how many bytes that took."""
    skipped = 0
    while part := stream.readline(_STEP):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _skip_blank(stream: Stream) -> tuple[int, int]:
    """Read over blank lines, many at a time; returns how many there were, and their bytes."""
    lines = skipped = 0
    while ahead := stream.peek(_STEP):
        blank = ahead[: len(ahead) - len(ahead.lstrip())]
        end = blank.rfind(b"\n") + 1
        if not end:
            break
        stream.read(end)
        lines, skipped = lines + blank.count(b"\n"), skipped + end
    return lines, skipped
