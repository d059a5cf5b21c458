"""The bytes of a file that may be compressed, by its ending: .gz, .zst, or as they are."""

import gzip
import io
from pathlib import Path
from typing import IO, Any

import zstandard

_CHUNK = 1 << 18


def decompressed(file: Path, raw: IO[bytes]) -> IO[bytes]:
    """The content of an open file, decompressed as its ending says.

    Reading raises EOFError, zlib.error or zstandard.ZstdError where it is damaged or cut off.
    """
    match file.suffix.lower():
        case ".gz":
            return gzip.open(raw)  # type: ignore[return-value]
        case ".zst":
            return io.BufferedReader(_Zstandard(raw), _CHUNK)
    return raw


class _Zstandard(io.RawIOBase):
    """The decompressed bytes of zstd frames; unlike the library's reader, it notices a frame that was cut off."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._refill():
            pass
        part = self._ready[: len(buffer)]
        self._ready = self._ready[len(part) :]
        buffer[: len(part)] = part
        return len(part)

    def _refill(self) -> bool:
        """Decompress some more; False at the end of the last frame."""
        compressed = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
        compressed = compressed or self._raw.read(_CHUNK // 8)
        if not compressed:
            if self._frame is not None and not self._frame.eof:
                raise EOFError("the last zstd frame has no end")
            return False
        if self._frame is None or self._frame.eof:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._ready = self._frame.decompress(compressed)
        return True
