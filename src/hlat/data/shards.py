"""Tokens of units, in order -> shard files of exactly ``shard_tokens`` tokens -> tokens by position.

A shard is a raw little-endian array. While it grows it has a temporary name; its sha256 is written beside it before
it gets its own, so a shard that exists is whole. The token file of a unit is removed as soon as finished shards hold
all of it, which keeps the disk that a preparation needs near the size of its result.
"""

import hashlib
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

from hlat.data.storage import sync_folder, write_whole
from hlat.runtime import DataError

CHECKSUM = ".sha256"  # ending of the file beside a shard while data is being prepared
_COPY = 1 << 22  # tokens copied at once


class ShardFile(NamedTuple):
    """A finished shard."""

    name: str
    tokens: int
    sha256: str


def token_dtype(vocab_size: int) -> str:
    """The smallest dtype for token ids."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _discard(file: IO[bytes]) -> None:
    """Close and remove a temporary file, also where the disk refuses what is left in its buffer."""
    Path(file.name).unlink(missing_ok=True)
    with suppress(OSError):  # closing writes the rest, and a full disk refuses that too
        file.close()


class ShardWriter:
    """Appends the tokens of units, in order, to the shards of one split; restarted, it skips what full shards hold.

    Args:
        folder: where the shards go.
        split: first part of their names.
        shard_tokens: tokens in every shard but the last.
        dtype: "uint16" or "uint32".
    """

    def __init__(self, folder: Path, split: str, shard_tokens: int, dtype: str) -> None:
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._full = 0
        while self._is_full(self._full):
            self._full += 1
        self._merged: deque[tuple[int, Path]] = deque()  # token files, and the position at which each ends
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self.position = 0

    def append(self, tokens: Path, count: int) -> None:
        """Append the ``count`` tokens of a file, which is removed once it is not needed any more.

        Raises:
            DataError: the file does not hold so many tokens.
            OSError: the disk refused.
        """
        start, self.position = self.position, self.position + count
        self._merged.append((self.position, tokens))
        kept = self._full * self._shard_tokens
        if count and self.position > kept:
            skip = max(kept - start, 0)
            self._copy(tokens, skip, count)
        self._drop_merged()

    def close(self) -> list[ShardFile]:
        """Finish the last shard, which may be shorter; returns all shards."""
        if self._file is not None:
            self._finish()
        names = [self._name(index) for index in range(-(-self.position // self._shard_tokens))]
        shards = []
        for name in names:
            size = (self._folder / name).stat().st_size // self._dtype.itemsize
            shards.append(ShardFile(name, size, (self._folder / f"{name}{CHECKSUM}").read_text()))
        return shards

    def abandon(self) -> None:
        """Give up the shard that is being written."""
        if self._file is not None:
            _discard(self._file)
            self._file = None

    def _name(self, index: int) -> str:
        return f"{self._split}-{index:05d}.bin"

    def _is_full(self, index: int) -> bool:
        path = self._folder / self._name(index)
        beside = self._folder / f"{path.name}{CHECKSUM}"
        size = self._shard_tokens * self._dtype.itemsize
        return path.is_file() and beside.is_file() and path.stat().st_size == size

    def _copy(self, tokens: Path, start: int, stop: int) -> None:
        if not tokens.is_file() or tokens.stat().st_size != stop * self._dtype.itemsize:
            raise DataError(
                f"{tokens}: unfinished preparation is damaged: this file should hold {stop} tokens. "
                f"Delete {tokens.parent.parent} and run again."
            )
        source = np.memmap(tokens, dtype=self._dtype, mode="r", shape=(stop,))
        while start < stop:
            count = min(stop - start, self._room(), _COPY)
            part = source[start : start + count].tobytes()
            file = self._open()
            file.write(part)
            self._digest.update(part)
            start += count
            if self._room() == 0:
                self._finish()

    def _open(self) -> IO[bytes]:
        if self._file is None:
            self._file = (self._folder / f"{self._name(self._full)}.tmp").open("wb")
            self._digest = hashlib.sha256()
        return self._file

    def _room(self) -> int:
        written = 0 if self._file is None else self._file.tell() // self._dtype.itemsize
        return self._shard_tokens - written

    def _finish(self) -> None:
        file = self._open()
        file.flush()
        os.fsync(file.fileno())
        file.close()
        name = self._name(self._full)
        write_whole(self._folder / f"{name}{CHECKSUM}", self._digest.hexdigest().encode())
        (self._folder / f"{name}.tmp").replace(self._folder / name)
        sync_folder(self._folder)  # before any token file that the shard holds is removed
        self._file = None
        self._full += 1

    def _drop_merged(self) -> None:
        while self._merged and self._merged[0][0] <= self._full * self._shard_tokens:
            self._merged.popleft()[1].unlink(missing_ok=True)


class DocumentWriter:
    """Writes where each document of a split begins: documents + 1 positions, uint64, the last being the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.with_name(f"{path.name}.tmp").open("wb")
        self._digest = hashlib.sha256()
        self._position = 0
        self.documents = 0
        self._write(np.zeros(1, dtype=np.uint64))

    def append(self, lengths: Sequence[int]) -> None:
        """Append documents of so many tokens each."""
        starts = self._position + np.cumsum(np.array(lengths, dtype=np.uint64), dtype=np.uint64)
        self._write(starts)
        self.documents += len(lengths)
        self._position = int(starts[-1]) if len(starts) else self._position

    def close(self) -> str:
        """Finish the file; returns its sha256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        Path(self._file.name).replace(self._path)
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Give up the file, unless it is finished."""
        _discard(self._file)

    def _write(self, positions: npt.NDArray[np.uint64]) -> None:
        content = positions.astype("<u8").tobytes()
        self._file.write(content)
        self._digest.update(content)


class TokenArray:
    """The tokens of a split by position, memory-mapped, across the borders of its shards."""

    def __init__(self, paths: Sequence[Path], counts: Sequence[int], dtype: str) -> None:
        little = np.dtype(dtype).newbyteorder("<")
        maps = [np.memmap(p, dtype=little, mode="r", shape=(n,)) for p, n in zip(paths, counts, strict=True)]
        self._shards = [
            np.asarray(one) for one in maps
        ]  # views of another class: slices of a memmap take 4 times as long
        self._paths = list(paths)
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def file_of(self, position: int) -> Path:
        """The shard that holds the token at a position."""
        return self._paths[int(np.searchsorted(self._starts, position, side="right")) - 1]

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens ``start <= position < stop``, int64."""
        out = np.empty(stop - start, dtype=np.int64)
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: npt.NDArray[np.int64]) -> None:
        """As many tokens from ``start`` on as ``out`` takes."""
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < len(out):
            begin = start + filled - int(self._starts[shard])
            part = self._shards[shard][begin : begin + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
