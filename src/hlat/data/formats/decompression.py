"""The bytes of a file that may be compressed, by its ending: .gz, .zst, or as they are.

A few compressed bytes may stand for gigabytes, so nothing is decompressed before it is asked for, and what is asked for
here is a piece of bounded size: how much of a line or a text is kept is up to hlat.data.formats.json_lines.
"""

import gzip
import io
from pathlib import Path
from typing import Any

import pyarrow as pa

_CHUNK = 1 << 18

Stream = io.BufferedReader | gzip.GzipFile
"""Bytes to be read once, from the beginning, with a look at those that come next."""


class DamagedStream(Exception):
    """Compressed data that cannot be read to its end."""


def open_decompressed(file: Path, raw: io.BufferedReader) -> Stream:
    """The content of an open file, decompressed as its ending says.

    Reading raises EOFError, zlib.error, gzip.BadGzipFile or DamagedStream where it is damaged or cut off.
    """
    match file.suffix.lower():
        case ".gz":
            return gzip.GzipFile(fileobj=raw)
        case ".zst":
            return io.BufferedReader(_Zstandard(raw), _CHUNK)
    return raw


def describe_expansion(raw: io.BufferedReader, taken: int) -> str:
    """How far a compressed file has been read, and how many bytes that has given."""
    read = max(raw.tell(), 1)
    return f"{read:,} compressed bytes gave {taken:,}, {taken / read:,.0f} times as many"


class _Zstandard(io.RawIOBase):
    """The decompressed bytes of zstd frames, one after the other."""

    def __init__(self, raw: io.BufferedReader) -> None:
        self._stream = pa.CompressedInputStream(raw, "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return int(self._stream.readinto(buffer))
        except OSError as error:
            if error.errno is not None:  # the file's, not the decompressor's
                raise
            raise DamagedStream(str(error)) from error
