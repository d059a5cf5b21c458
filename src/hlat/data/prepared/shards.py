"""Tokens of units, in order -> shard files of exactly ``shard_tokens`` tokens -> tokens by position.

A shard is a raw little-endian array. While it grows it has a temporary name; its sha256 is written beside it before
it gets its own, so a shard that exists is whole. The token file of a unit is removed as soon as finished shards hold
all of it, which keeps the disk that a preparation needs near the size of its result.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hlat.data.manifest import shard_file
from hlat.data.sources import Split
from hlat.data.stores import AtomicFileWriter, sync_folder
from hlat.runtime import DataError

CHECKSUM_SUFFIX = ".sha256"  # ending of the file beside a shard while data is being prepared
_COPY = 1 << 22  # tokens copied at once

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class ShardFile(NamedTuple):
    """A finished shard."""

    name: str
    tokens: int
    sha256: str


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest dtype for token ids."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class ShardWriter:
    """Appends the tokens of units, in order, to the shards of one split; restarted, it skips what full shards hold.

    Args:
        folder: where the shards go.
        split: first part of their names.
        shard_tokens: tokens in every shard but the last.
        dtype: "uint16" or "uint32".
        consume: whether the token files of units are removed once they are not needed any more.
    """

    def __init__(self, folder: Path, split: Split, shard_tokens: int, dtype: str, consume: bool = True) -> None:
        self._folder, self._split, self._shard_tokens, self._consume = folder, split, shard_tokens, consume
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._full = 0
        while self._is_full(self._full):
            self._full += 1
        self._merged: deque[tuple[int, Path]] = deque()  # token files, and the position at which each ends
        self._file: AtomicFileWriter | None = None
        self.position = 0

    def append(self, tokens: Path, lengths: Int64s, kept: Bools, sha256: str) -> None:
        """Append documents from a file that holds them one after the other, each of so many tokens.

        Args:
            tokens: the file.
            lengths: tokens of each of its documents, int64, shape (documents,).
            kept: which of them are wanted, shape (documents,).
            sha256: of the file, compared before it is copied from.

        Raises:
            DataError: the file does not hold these documents.
            OSError: the disk refused.
        """
        start, self.position = self.position, self.position + int(lengths[kept].sum())
        self._merged.append((self.position, tokens))
        finished = self._full * self._shard_tokens
        if self.position > max(start, finished):
            self._check(tokens, int(lengths.sum()), sha256)
            self._copy(tokens, int(lengths.sum()), _stretches(lengths, kept, skip=max(finished - start, 0)))
        self._drop_merged()

    def close(self) -> list[ShardFile]:
        """Finish the last shard, which may be shorter; returns all shards."""
        if self._file is not None:
            self._finish()
        names = [self._name(index) for index in range(-(-self.position // self._shard_tokens))]
        shards = []
        for name in names:
            size = (self._folder / name).stat().st_size // self._dtype.itemsize
            shards.append(ShardFile(name, size, (self._folder / f"{name}{CHECKSUM_SUFFIX}").read_text()))
        return shards

    def abandon(self) -> None:
        """Give up the shard that is being written."""
        if self._file is not None:
            self._file.abandon()
            self._file = None

    def _name(self, index: int) -> str:
        return shard_file(self._split, index)

    def _is_full(self, index: int) -> bool:
        path = self._folder / self._name(index)
        beside = self._folder / f"{path.name}{CHECKSUM_SUFFIX}"
        size = self._shard_tokens * self._dtype.itemsize
        return path.is_file() and beside.is_file() and path.stat().st_size == size

    def _check(self, tokens: Path, count: int, sha256: str) -> None:
        right = tokens.is_file() and tokens.stat().st_size == count * self._dtype.itemsize
        if right:
            with tokens.open("rb") as file:
                right = hashlib.file_digest(file, "sha256").hexdigest() == sha256
        if not right:
            raise DataError(
                f"{tokens}: unfinished preparation is damaged: this is not the file of {count} tokens that was written "
                f"here. Delete {tokens.parent.parent} and run its hlat data prepare again."
            )

    def _copy(self, tokens: Path, count: int, stretches: Iterator[tuple[int, int]]) -> None:
        source = np.memmap(tokens, dtype=self._dtype, mode="r", shape=(count,))
        for begin, stop in stretches:
            start = begin
            while start < stop:
                part = source[start : start + min(stop - start, self._room(), _COPY)]
                self._open().write(part.tobytes())
                start += len(part)
                if self._room() == 0:
                    self._finish()

    def _open(self) -> AtomicFileWriter:
        if self._file is None:
            self._file = AtomicFileWriter(self._folder / self._name(self._full))
        return self._file

    def _room(self) -> int:
        written = 0 if self._file is None else self._file.size // self._dtype.itemsize
        return self._shard_tokens - written

    def _finish(self) -> None:
        self._open().close(checksum_suffix=CHECKSUM_SUFFIX)
        sync_folder(self._folder)  # before any token file that the shard holds is removed
        self._file = None
        self._full += 1

    def _drop_merged(self) -> None:
        while self._merged and self._merged[0][0] <= self._full * self._shard_tokens:
            merged = self._merged.popleft()[1]
            if self._consume:
                merged.unlink(missing_ok=True)


def _stretches(lengths: Int64s, kept: Bools, skip: int) -> Iterator[tuple[int, int]]:
    """Where the tokens of the documents that are kept begin and end in their file, without the first ``skip`` of them.

    Documents that follow one another are one stretch.
    """
    ends = np.cumsum(lengths)
    edges = np.flatnonzero(np.diff(kept.astype(np.int8), prepend=0, append=0))  # where a run begins, where it has ended
    for first, after in zip(edges[::2], edges[1::2], strict=True):
        begin, stop = int(ends[first] - lengths[first]), int(ends[after - 1])
        passed = min(skip, stop - begin)
        skip -= passed
        if begin + passed < stop:
            yield begin + passed, stop


class BoundaryWriter:
    """Writes where each document of a split begins: documents + 1 positions, uint64, the last being the end."""

    def __init__(self, path: Path) -> None:
        self._file = AtomicFileWriter(path)
        self._position = 0
        self.documents = 0
        self._file.write(bytes(8))

    def append(self, lengths: Int64s) -> None:
        """Append documents of so many tokens each."""
        ends = self._position + np.cumsum(lengths)
        self._file.write(ends.astype("<u8").tobytes())
        self.documents += len(lengths)
        self._position += int(lengths.sum())

    def close(self) -> str:
        """Finish the file; returns its sha256."""
        return self._file.close()

    def abandon(self) -> None:
        """Give up the file, unless it is finished."""
        self._file.abandon()


class TokenArray:
    """The tokens of a split by position, memory-mapped, across the borders of its shards."""

    def __init__(self, paths: Sequence[Path], counts: Sequence[int], dtype: str) -> None:
        little = np.dtype(dtype).newbyteorder("<")
        maps = [np.memmap(p, dtype=little, mode="r", shape=(n,)) for p, n in zip(paths, counts, strict=True)]
        self._shards = [
            np.asarray(one) for one in maps
        ]  # plain arrays over the same pages: slicing np.memmap makes an object of its own class each time
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
