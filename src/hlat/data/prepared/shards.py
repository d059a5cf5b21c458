"""Shards: files of exactly ``shard_tokens`` tokens, written from work units, read by position, and compared as read.

    token files of units, in order --copy--> shards --memory map--> tokens by position
    tokens of a row --pages of 64 KiB--> ContentRecord --> the same as before, or a DataError with the shard
    shards that are not compared before training --a process of low priority--> checksums of the manifest

A shard is a raw little-endian array, written under a temporary name. Before it gets its final name, its sha256 is
written to a file next to it. So a shard under its final name is complete. The token file of a unit is removed as soon
as finished shards contain all its tokens: a preparation needs little more disk space than its result.

Rank 0 starts the process; a thread would take the interpreter from the training step. It does not read again what an
earlier start compared.
"""

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from hlat.data.documents import SPLITS, Split
from hlat.data.prepared.manifest import DataManifest, ShardRecord, read_data_manifest, shard_file
from hlat.data.stores.local_files import AtomicFileWriter, ContentRecord
from hlat.runtime.errors import DataError, HlatError
from hlat.runtime.helper_process import Channel, HelperProcess, PeerEnded, start_program
from hlat.runtime.storage.local_files import sync_to_disk

CHECKSUM_SUFFIX = ".sha256"  # suffix of the file with the checksum of a shard, while data is being prepared
_COPY_TOKENS = 1 << 22  # tokens copied at once

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smallest dtype for the token ids of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class ShardWriter:
    """Writes the shards of one split from the tokens of work units in order.

    After a restart, the same units are appended again; tokens that full shards contain already are skipped. With
    ``consume``, token files of units are removed when finished shards contain them.
    """

    def __init__(self, folder: Path, split: Split, shard_tokens: int, dtype: str, consume: bool = True) -> None:
        self._folder, self._split, self._shard_tokens, self._consume = folder, split, shard_tokens, consume
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._full_shards = 0
        while self._is_full(self._full_shards):
            self._full_shards += 1
        self._merged: deque[tuple[int, Path]] = deque()  # end position and path of each token file
        self._file: AtomicFileWriter | None = None
        self.position = 0

    # Lengths in tokens, int64, and kept, bool: shape (documents,).
    def append(self, tokens: Path, lengths: Int64s, kept: Bools, sha256: str) -> None:
        """Append the ``kept`` documents of a unit's token file; DataError if the file is damaged."""
        start, self.position = self.position, self.position + int(lengths[kept].sum())
        self._merged.append((self.position, tokens))
        finished = self._full_shards * self._shard_tokens
        if self.position > max(start, finished):  # else all of it is in full shards already, and the file may be gone
            self._check(tokens, int(lengths.sum()), sha256)
            self._copy(tokens, int(lengths.sum()), _kept_ranges(lengths, kept, skip=max(finished - start, 0)))
        self._drop_merged()

    def close(self) -> list[ShardRecord]:
        """Complete the last shard, which may be shorter, and return all shards."""
        if self._file is not None:
            self._finish()
        names = [self._name(index) for index in range(-(-self.position // self._shard_tokens))]
        shards = []
        for name in names:
            size, sha256 = (self._folder / name).stat().st_size, (self._folder / f"{name}{CHECKSUM_SUFFIX}").read_text()
            shards.append(ShardRecord(file=name, tokens=size // self._dtype.itemsize, bytes=size, sha256=sha256))
        return shards

    def abandon(self) -> None:
        """Remove the shard that is not complete."""
        if self._file is not None:
            self._file.abandon()
            self._file = None

    def _name(self, index: int) -> str:
        return shard_file(self._split, index)

    def _is_full(self, index: int) -> bool:
        path = self._folder / self._name(index)
        checksum = self._folder / f"{path.name}{CHECKSUM_SUFFIX}"
        size = self._shard_tokens * self._dtype.itemsize
        return path.is_file() and checksum.is_file() and path.stat().st_size == size

    def _check(self, tokens: Path, count: int, sha256: str) -> None:
        matches = tokens.is_file() and tokens.stat().st_size == count * self._dtype.itemsize
        if matches:
            with tokens.open("rb") as file:
                matches = hashlib.file_digest(file, "sha256").hexdigest() == sha256
        if not matches:
            raise DataError(
                f"{tokens}: unfinished preparation is damaged: this is not the file of {count} tokens that was "
                f"written. Delete {tokens.parent.parent} and run its hlat data prepare again."
            )

    def _copy(self, tokens: Path, count: int, ranges: Iterator[tuple[int, int]]) -> None:
        source = np.memmap(tokens, dtype=self._dtype, mode="r", shape=(count,))
        for begin, stop in ranges:
            start = begin
            while start < stop:
                copied = source[start : start + min(stop - start, self._free_tokens(), _COPY_TOKENS)]
                self._open().write(copied.tobytes())
                start += len(copied)
                if self._free_tokens() == 0:
                    self._finish()

    def _open(self) -> AtomicFileWriter:
        if self._file is None:
            self._file = AtomicFileWriter(self._folder / self._name(self._full_shards))
        return self._file

    def _free_tokens(self) -> int:
        written = 0 if self._file is None else self._file.size // self._dtype.itemsize
        return self._shard_tokens - written

    def _finish(self) -> None:
        self._open().close(checksum_suffix=CHECKSUM_SUFFIX)
        sync_to_disk(self._folder)  # before the token files that the shard contains are removed
        self._file = None
        self._full_shards += 1

    def _drop_merged(self) -> None:
        while self._merged and self._merged[0][0] <= self._full_shards * self._shard_tokens:
            merged = self._merged.popleft()[1]
            if self._consume:
                merged.unlink(missing_ok=True)


def _kept_ranges(lengths: Int64s, kept: Bools, skip: int) -> Iterator[tuple[int, int]]:
    """Yield the token ranges of runs of kept documents, without the first ``skip`` tokens."""
    ends = np.cumsum(lengths)
    # First document of each run of kept ones, and its end.
    edges = np.flatnonzero(np.diff(kept.astype(np.int8), prepend=0, append=0))
    for first, after in zip(edges[::2], edges[1::2], strict=True):
        begin, stop = int(ends[first] - lengths[first]), int(ends[after - 1])
        skipped = min(skip, stop - begin)
        skip -= skipped
        if begin + skipped < stop:
            yield begin + skipped, stop


class BoundaryWriter(AtomicFileWriter):
    """Writes first token of each document and end of the last one, uint64."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._position = 0
        self.documents = 0
        self.write(bytes(8))  # document 0 begins at token 0

    def append(self, lengths: Int64s) -> None:
        """Append documents by their number of tokens, int64, shape (documents,)."""
        ends = self._position + np.cumsum(lengths)
        self.write(ends.astype("<u8").tobytes())
        self.documents += len(lengths)
        self._position += int(lengths.sum())


class TokenArray:
    """Tokens of a split by position, memory-mapped, across its shards.

    ``check`` gets shard, first byte and end before these bytes are read, and raises DataError if they have changed.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        counts: Sequence[int],
        dtype: str,
        check: Callable[[int, int, int], None] = lambda *_: None,
    ) -> None:
        little, self._check = np.dtype(dtype).newbyteorder("<"), check
        maps = [np.memmap(p, dtype=little, mode="r", shape=(n,)) for p, n in zip(paths, counts, strict=True)]
        # Plain arrays over the same pages, because every slice of an np.memmap is a slow np.memmap object again.
        self._shards = [np.asarray(shard) for shard in maps]
        self._paths = list(paths)
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def file_of(self, position: int) -> Path:
        """Return the shard file with the token at a position."""
        return self._paths[int(np.searchsorted(self._starts, position, side="right")) - 1]

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Read the tokens ``start <= position < stop``, int64, shape (stop - start,)."""
        out = np.empty(stop - start, dtype=np.int64)
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: npt.NDArray[np.int64]) -> None:
        """Fill ``out``, int64, with the tokens from ``start`` on."""
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < len(out):
            begin = start + filled - int(self._starts[shard])
            tokens = self._shards[shard][begin : begin + len(out) - filled]
            self._check(shard, begin * tokens.itemsize, (begin + len(tokens)) * tokens.itemsize)
            out[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
            shard += 1


_CONTENT_FILE = "shards.content"
_CONTENT_PAGE = 1 << 16  # what a memory map reads at once anyway
_CONTENT_REMEDY = (
    "Restore the file, or delete its folder and prepare again: the same corpus and settings give the same data."
)


class ShardContent:
    """Compares the shards of both splits, as they are read, with records in ``folders``."""

    def __init__(self, folder: Path, manifest: DataManifest, folders: Sequence[Path]) -> None:
        self._folder, self._folders = folder, folders
        self._shards = [shard for split in SPLITS for shard in manifest.splits[split].shards]
        self._first = {"train": 0, "validation": len(manifest.splits["train"].shards)}
        self._paths = [folder / shard.file for shard in self._shards]
        files = [(str(path), shard.bytes) for path, shard in zip(self._paths, self._shards, strict=True)]
        self._record = ContentRecord(
            [each / _CONTENT_FILE for each in folders], files, _CONTENT_PAGE, manifest.fingerprint, _CONTENT_REMEDY
        )
        self._process: HelperProcess | None = None
        self._lock, self._problem, self._unfinished = threading.Lock(), "", ""

    def check(self, split: Split, shard: int, start: int, stop: int) -> None:
        """Compare or record pages of ``start <= byte < stop``; DataError if they, or a checksum, differ."""
        if self._process is not None or self._problem:
            self.look_at_process()
        number = self._first[split] + shard
        self._record.check(number, self._paths[number], start, stop)

    def look_at_process(self) -> str:
        """Return why not all checksums were compared, or ""; DataError for a difference."""
        with self._lock:  # training and evaluation read in threads of their own
            if self._process is not None and self._process.has_ended():
                process, self._process = self._process, None
                try:
                    process.receive()
                except PeerEnded as end:
                    self._unfinished = f"the process that compares them ended with code {end.code}" if end.code else ""
                except DataError as error:
                    self._problem = str(error)
                except (HlatError, RuntimeError):  # of the process, not of a shard: the run goes on
                    self._unfinished = "the process that compares them ended with code 1"
                process.close()
        if self._problem:
            raise DataError(self._problem)
        return self._unfinished

    def compare_all(self, splits: Sequence[Split]) -> None:
        """Start the process that compares the shards of some splits with their checksums."""
        if splits:
            self._unfinished = "the run has ended before"  # true until the process has ended
            self._process = start_program(
                f"{__name__}:compare_checksums",
                *(self._folder, splits, self._folders),
                name="the process that compares checksums",
                niceness=19,  # training must not become slower by it
            )

    def compare(self, splits: Sequence[Split]) -> None:
        """Compare shards with their checksums; DataError if one differs or cannot be read."""
        for number, shard in enumerate(self._shards):
            if ("train" if number < self._first["validation"] else "validation") in splits:
                # A shard that was compared since it was written is not read.
                self._record.complete(number, self._paths[number], shard.sha256)


def compare_checksums(channel: Channel, folder: Path, splits: Sequence[Split], folders: Sequence[Path]) -> None:
    """Compare shards as ``ShardContent.compare``; the work of a helper process."""
    manifest = read_data_manifest(folder)
    assert manifest is not None, "the folder was opened"
    ShardContent(folder, manifest, folders).compare(splits)
