r"""Split a stream of bytes into lines with bounded memory: at most ``MAX_LINE_BYTES`` + 1 bytes of a line are kept.

Lines end at b"\n" only. Of a longer line only the beginning is returned. The rest is skipped when the next line is
requested, so that a caller that stops at a too long line does not wait for it to be decompressed.
"""

from collections.abc import Iterator
from typing import NamedTuple

from hlat.data.formats.streams.decompression import Stream

MAX_LINE_BYTES = 1 << 28
"""Maximum bytes of a line with its newline; 100 MB of Chinese text take 200 MB if JSON spells it as \\uXXXX."""
BOM = b"\xef\xbb\xbf"
"""Byte order mark of UTF-8, which some programs write at the beginning of a file: no part of its text."""
_READ_BYTES = 1 << 16


class TextLine(NamedTuple):
    """A line that is not blank.

    Attributes:
        number: line number from 1; blank lines count.
        offset: byte of the stream at which the line begins.
        content: bytes of the line with its newline; of a longer line the first ``MAX_LINE_BYTES`` + 1 bytes.
    """

    number: int
    offset: int
    content: bytes

    @property
    def end(self) -> int:
        """Offset in the stream of the byte after ``content``."""
        return self.offset + len(self.content)

    @property
    def is_too_long(self) -> bool:
        """True if the line is longer than ``MAX_LINE_BYTES``; ``content`` is then only its beginning."""
        return len(self.content) > MAX_LINE_BYTES


def iter_lines(stream: Stream, number: int = 0, offset: int = 0) -> Iterator[TextLine]:
    """Yield the lines of a stream that are not blank.

    Args:
        stream: the stream, read from its current position.
        number: lines before this position.
        offset: bytes before this position.
    """
    while content := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if content.isspace() and len(content) <= MAX_LINE_BYTES:
            blank, skipped = skip_blank(stream)
            number, offset = number + blank, offset + len(content) + skipped
            continue
        yield TextLine(number, offset, content)
        offset += len(content)
        rest = len(content) > MAX_LINE_BYTES and not content.endswith(b"\n")
        del content  # frees memory before more is read
        if rest:
            offset += skip_line(stream)


def skip_line(stream: Stream) -> int:
    """Read to the end of the current line; return the number of bytes read."""
    skipped = 0
    while chunk := stream.readline(_READ_BYTES):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return skipped


def skip_blank(stream: Stream, characters: bytes | None = None) -> tuple[int, int]:
    """Skip blank lines, many at a time; return the number of lines and their bytes.

    Args:
        stream: the stream, at the beginning of a line.
        characters: bytes of which a blank line consists; None for all white space.
    """
    lines = skipped = 0
    while peeked := stream.peek(_READ_BYTES):
        blank = peeked[: len(peeked) - len(peeked.lstrip(characters))]
        end = blank.rfind(b"\n") + 1
        if not end:
            break
        stream.read(end)
        lines, skipped = lines + blank.count(b"\n"), skipped + end
    return lines, skipped
