"""Decompress gzip and zstd files while reading; other files are read as they are.

A few compressed bytes can expand to gigabytes. So data is decompressed only when it is read, in chunks of bounded size;
the readers of lines and texts bound how much of one is kept in memory.
"""

import gzip
import io
from pathlib import Path
from typing import Any

import pyarrow as pa

_GZIP, _ZSTD = (".gz", ".gzip"), (".zst", ".zstd")
COMPRESSED_ENDINGS = (*_GZIP, *_ZSTD)
_CHUNK = 1 << 18

Stream = io.BufferedReader | gzip.GzipFile
"""A stream of bytes that is read once, from the beginning, and can be peeked into."""


class DamagedStream(Exception):
    """Compressed data is damaged or truncated."""


class LongWindowError(Exception):
    """Compressed data is whole, but the library refuses the memory that decompressing it takes."""


def is_compressed(file: Path) -> bool:
    """Return True if the suffix of a file says that it is compressed."""
    return file.suffix.lower() in COMPRESSED_ENDINGS


def is_other_content(file: Path, head: bytes) -> bool:
    """Return True if the first bytes of a file show that it is not compressed as its suffix says."""
    if file.suffix.lower() in _GZIP:
        return not head.startswith(b"\x1f\x8b")
    return not (head.startswith(b"\x28\xb5\x2f\xfd") or head[1:4] == b"\x2a\x4d\x18")  # a frame, or one to skip


def open_decompressed(file: Path, raw: io.BufferedReader) -> Stream:
    """Return a stream of the decompressed content of an open file; the file's suffix selects the format.

    Reading from the stream raises EOFError, zlib.error, gzip.BadGzipFile or DamagedStream if the data is damaged or
    truncated, and LongWindowError.
    """
    ending = file.suffix.lower()
    if ending in _GZIP:
        return gzip.GzipFile(fileobj=raw)
    return io.BufferedReader(_Zstandard(raw), _CHUNK) if ending in _ZSTD else raw


def describe_expansion(raw: io.BufferedReader, decompressed: int) -> str:
    """Describe how many compressed bytes have been read, how many bytes they gave, and the ratio, for messages."""
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
