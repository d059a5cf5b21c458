"""Streams of bytes: decompressed while they are read, and split into lines with bounded memory.

    file (.gz, .zst or plain) --open_decompressed--> bytes, in chunks --iter_lines--> lines

A few compressed bytes can expand to gigabytes. So data is decompressed only when it is read, in chunks of bounded size;
the readers of lines and texts bound how much of one is kept in memory.

Lines end at line feeds only. At most ``MAX_LINE_BYTES`` + 1 bytes of a line are kept.
"""

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

_GZIP, _ZSTD = (".gz", ".gzip"), (".zst", ".zstd")
COMPRESSED_ENDINGS = (*_GZIP, *_ZSTD)
_CHUNK = 1 << 18

# A stream of bytes that is read once, from the beginning, and can be peeked into.
Stream = io.BufferedReader | gzip.GzipFile


class DamagedStream(Exception):
    """Compressed data is damaged or truncated."""


class LongWindowError(Exception):
    """Compressed data is whole, but the library refuses the memory that decompressing it takes."""


def is_compressed(file: Path) -> bool:
    """Return True if the suffix of a file says that it is compressed."""
    return file.suffix.lower() in COMPRESSED_ENDINGS


def is_other_content(file: Path, head: bytes) -> bool:
    """Return True if the first bytes show that a file is not compressed as its suffix says."""
    if file.suffix.lower() in _GZIP:
        return not head.startswith(b"\x1f\x8b")
    return not (head.startswith(b"\x28\xb5\x2f\xfd") or head[1:4] == b"\x2a\x4d\x18")  # a frame, or one to skip


def open_decompressed(file: Path, raw: io.BufferedReader) -> Stream:
    """Return the decompressed content, by suffix; reading raises what ``convert_file_errors`` converts."""
    ending = file.suffix.lower()
    if ending in _GZIP:
        return gzip.GzipFile(fileobj=raw)
    return io.BufferedReader(_Zstandard(raw), _CHUNK) if ending in _ZSTD else raw


def describe_expansion(raw: io.BufferedReader, decompressed: int) -> str:
    """Describe for messages how many compressed bytes gave how many bytes, and the ratio."""
    read = max(raw.tell(), 1)
    return f"{read:,} compressed bytes gave {decompressed:,}, {decompressed / read:,.0f} times as many"


class _Zstandard(io.RawIOBase):
    """Raw stream of the decompressed bytes of concatenated zstd frames."""

    def __init__(self, raw: io.BufferedReader) -> None:
        self._stream = pa.CompressedInputStream(raw, "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return int(self._stream.readinto(buffer))
        except OSError as error:
            if error.errno is not None:  # an error of the file, not of the decompressor
                raise
            # The library's limit is a window of 2**27 bytes, and it gives no number or class to the error.
            raise (LongWindowError if "too much memory" in str(error) else DamagedStream)(str(error)) from error


# Maximum bytes of a line with its newline; 100 MB of Chinese text take 200 MB if JSON spells it as \uXXXX.
MAX_LINE_BYTES = 1 << 28
# Byte order mark of UTF-8, which some programs write at the beginning of a file: no part of its text.
BOM = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 16


class Record(NamedTuple):
    """A line that is not blank, or a record of several lines; of one that is too long only the beginning."""

    line: int  # number of its first line, from 1; blank lines count
    offset: int  # byte of the stream at which it begins
    end: int  # byte of the stream after it, as far as it was read
    content: bytes  # its bytes with its line end; of a longer record the first ``MAX_LINE_BYTES`` + 1 bytes
    is_closed: bool = True  # False if the stream ends within a quoted field of it

    @property
    def is_too_long(self) -> bool:
        """True if ``content`` is only the beginning of the record."""
        return len(self.content) > MAX_LINE_BYTES


def iter_lines(stream: Stream, offset: int = 0) -> Iterator[Record]:
    """Yield the lines that are not blank; ``offset`` bytes precede the position."""
    number = 0
    while content := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if content.isspace() and len(content) <= MAX_LINE_BYTES:
            blank, skipped = skip_blank(stream)
            number, offset = number + blank, offset + len(content) + skipped
            continue
        yield Record(number, offset, offset + len(content), content)
        offset += len(content)
        rest = len(content) > MAX_LINE_BYTES and not content.endswith(b"\n")
        del content  # frees memory before more is read
        # Only now, when the next line is requested: a caller that stops at a long line does not wait for the rest of it
        # to be decompressed.
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
    """Skip lines of white space, or of ``characters``, many at a time; return lines and bytes."""
    lines = skipped = 0
    while peeked := stream.peek(_READ_BYTES):
        blank = peeked[: len(peeked) - len(peeked.lstrip(characters))]
        end = blank.rfind(b"\n") + 1
        if not end:
            break
        stream.read(end)  # up to the last line end only: white space after it may begin a line with text
        lines, skipped = lines + blank.count(b"\n"), skipped + end
    return lines, skipped
