"""Read rectangular regions of tensors from the files of a checkpoint, whatever chunks they were saved in.

    region --index--> the chunks that it overlaps --> rows of each, read in parallel directly into the region's memory

A chunk is stored as torch.save writes a tensor: an uncompressed zip archive whose record ``data/0`` has the elements in
row-major order (APPNOTE.TXT of the zip format, sections 4.3.7 and 4.4). The elements are read from that record, so a
process reads only the rows it needs, and nothing is unpickled.
"""

import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import SEEK_CUR, SEEK_END, SEEK_SET, FileIO, RawIOBase
from pathlib import Path
from typing import Any, cast
from zipfile import ZIP_STORED, ZipFile

import torch

from hlat.checkpoint.format.index import StoredChunk, StoredTensor
from hlat.runtime.errors import CheckpointError

_THREADS = min(8, os.cpu_count() or 1)
_BATCH_BYTES = 1 << 24  # read at a time if only some columns of the rows are needed

_LOCAL_HEADER = struct.Struct("<26xHH")  # its last fields: lengths of file name and extra field, which follow it


@dataclass(frozen=True)
class Region:
    """A rectangular region of a saved tensor, to be read; it lies inside the tensor."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class _Overlap:
    """Intersection of a region and a saved chunk, and the memory it is read into."""

    target: torch.Tensor  # view of the region's memory
    chunk: StoredChunk
    begin: tuple[int, ...]  # index of the intersection's first element in the chunk


def read_regions(folder: Path, index: Mapping[str, StoredTensor], regions: Sequence[Region]) -> list[torch.Tensor]:
    """Read regions into new CPU tensors of the saved dtype.

    Args:
        folder: the checkpoint.
        index: its tensors by name, from ``read_index``.
        regions: regions of tensors in the index.

    Raises:
        CheckpointError: a file cannot be read, or contradicts the index.
    """
    found: list[torch.Tensor] = []
    overlaps: list[_Overlap] = []
    for region in regions:
        saved = index[region.name]
        found.append(torch.empty(region.sizes, dtype=saved.dtype))
        overlaps += _overlaps(region, found[-1], saved)
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(lambda overlap: _read(folder, overlap), overlaps):
                pass
    except Exception as exc:
        raise CheckpointError(f"{folder}: its tensors cannot be read ({type(exc).__name__}: {exc})") from exc
    return found


def _overlaps(region: Region, target: torch.Tensor, saved: StoredTensor) -> Iterator[_Overlap]:
    for chunk in saved.chunks:
        begin = [max(a, b) for a, b in zip(region.offsets, chunk.offsets, strict=True)]
        ends = zip(region.offsets, region.sizes, chunk.offsets, chunk.sizes, strict=True)
        sizes = [min(a + m, b + n) - start for start, (a, m, b, n) in zip(begin, ends, strict=True)]
        if min(sizes, default=1) > 0:
            view = target
            for dimension, (start, size) in enumerate(zip(begin, sizes, strict=True)):
                view = view.narrow(dimension, start - region.offsets[dimension], size)
            inside = tuple(start - offset for start, offset in zip(begin, chunk.offsets, strict=True))
            yield _Overlap(view, chunk, inside)


def _read(folder: Path, overlap: _Overlap) -> None:
    target, sizes = overlap.target, overlap.chunk.sizes
    item = target.element_size()
    with FileIO(folder / overlap.chunk.file) as file:
        start = _elements(file, overlap.chunk, math.prod(sizes) * item)
        if not sizes:
            _fill(file, start, target)
            return
        row, (first, *columns) = math.prod(sizes[1:]) * item, overlap.begin
        if target.shape[1:] == sizes[1:] and target.is_contiguous():
            _fill(file, start + first * row, target)
            return
        step = max(1, _BATCH_BYTES // row)
        for done in range(0, target.shape[0], step):
            batch = target[done : done + step]
            rows = torch.empty((batch.shape[0], *sizes[1:]), dtype=target.dtype)
            _fill(file, start + (first + done) * row, rows)
            for dimension, column in enumerate(columns, start=1):
                rows = rows.narrow(dimension, column, batch.shape[dimension])
            batch.copy_(rows)


def _fill(file: FileIO, position: int, target: torch.Tensor) -> None:
    """Read bytes from a position of a file into a contiguous tensor."""
    view = memoryview(cast(Any, target.reshape(-1).view(torch.uint8).numpy()))
    file.seek(position)
    while view:
        count = file.readinto(view)
        if not count:
            raise EOFError(f"{file.name!r} ends too early")
        view = view[count:]


def _elements(file: FileIO, chunk: StoredChunk, nbytes: int) -> int:
    """Byte position in the file of a chunk's elements.

    Raises:
        ValueError: the chunk's bytes have no record of ``nbytes`` uncompressed bytes of elements.
    """
    with ZipFile(cast(Any, _Slice(file, chunk.begin, chunk.length))) as archive:
        records = [record for record in archive.infolist() if record.filename.endswith("/data/0")]
    if len(records) != 1 or records[0].compress_type != ZIP_STORED or records[0].file_size != nbytes:
        raise ValueError(f"{file.name!r} does not hold {nbytes} bytes of elements at {chunk.begin}")
    header = chunk.begin + records[0].header_offset
    file.seek(header)
    name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start: int = header + _LOCAL_HEADER.size + name + extra
    if not chunk.begin <= start <= chunk.begin + chunk.length - nbytes:
        raise ValueError(f"{file.name!r} holds elements outside their byte range at {chunk.begin}")
    return start


class _Slice(RawIOBase):
    """A byte range of an open file, as a file object."""

    def __init__(self, file: FileIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        base = {SEEK_SET: 0, SEEK_CUR: self._position, SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")  # as a real file does; ZipFile relies on it
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        self._file.seek(self._offset + self._position)
        count = self._file.readinto(view)
        self._position += count or 0
        return count or 0
