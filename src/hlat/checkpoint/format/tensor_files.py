"""The tensors of a checkpoint: as chunks in memory, in files, and read back in rectangular regions.

    parameters, moments, RNG states --collect--> TensorChunk, TensorChunk, ...     of a process; together they cover
                                                      |                            each tensor exactly once
          files of the process, in parallel <--write_chunks--+--> file and byte range of each chunk, for the index
                                                                        |
    Region --index--> the chunks that it overlaps --read_regions--> rows of each, directly into the region's memory

A chunk is stored in the bytes that torch.save writes for a tensor, so DCP's own reader can read these files too: an
uncompressed zip archive whose record ``data/0`` has the elements in row-major order (APPNOTE.TXT of the zip format,
sections 4.3.7 and 4.4). The elements are read from that record, so a process reads only the rows it needs, whatever
chunks they were saved in, and nothing is unpickled. Nothing here waits for another process.
"""

import math
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import SEEK_CUR, SEEK_END, SEEK_SET, FileIO, RawIOBase
from pathlib import Path
from typing import IO, Any, cast
from zipfile import ZIP_STORED, ZipFile

import torch

from hlat.checkpoint.format.filesystem import Disk, FileRecord, HashedFile
from hlat.checkpoint.format.index import StoredChunk, StoredTensor
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import CheckpointError


@dataclass(frozen=True)
class TensorChunk:
    """A rectangular chunk of a named tensor, not yet written."""

    name: str
    shape: tuple[int, ...]  # of the full tensor
    offsets: tuple[int, ...]  # index of the chunk's first element in the full tensor
    # The chunk, split along its first dimension into consecutive tensors: views of live tensors on any device. There
    # are several because a parameter that fuses several tensors interleaves their rows.
    rows: tuple[torch.Tensor, ...]
    replicated: bool = False  # every process has it, and rank 0 writes it; else no other has it

    @property
    def sizes(self) -> tuple[int, ...]:
        first = self.rows[0].shape
        return tuple(first) if len(self.rows) == 1 else (sum(rows.shape[0] for rows in self.rows), *first[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.rows[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows)

    def tensor(self) -> torch.Tensor:
        # Shares memory with ``rows`` where that is possible.
        return _compact(self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows))


@dataclass(frozen=True)
class ComputedChunk(TensorChunk):
    """A chunk whose values are computed when it is written, so that few are in memory at a time."""

    # Returns the values, while ``rows`` have shape and dtype only (meta device). Several chunks may be computed at
    # the same time, each in a thread of its own.
    compute: Callable[[], torch.Tensor] = field(kw_only=True)

    def tensor(self) -> torch.Tensor:
        return _compact(self.compute())


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    # torch.save writes the complete storage, also that of a small view.
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def replicated_chunks(tensors: Mapping[str, torch.Tensor]) -> list[TensorChunk]:
    """One chunk per tensor, covering all of it, for tensors that every process has; rank 0 writes them."""
    return [
        TensorChunk(name, tuple(tensor.shape), (0,) * tensor.ndim, (tensor,), replicated=True)
        for name, tensor in tensors.items()
    ]


_FILE_BYTES = 1 << 30  # approximate file size: several files can be hashed and read in parallel
_WRITERS = min(8, os.cpu_count() or 1)


@sendable
@dataclass(frozen=True)
class WriteResult:
    """Files that a process wrote, and the chunks in them."""

    files: dict[str, FileRecord]
    chunks: list[StoredChunk]


def write_chunks(disk: Disk, folder: Path, chunks: Sequence[TensorChunk], rank: int) -> WriteResult:
    """Write the chunks of a process into an existing folder and fsync the files, but not the folder itself."""
    # After an error the other threads stop at their next chunk; the caller removes what was written.
    stop = threading.Event()
    tasks = [
        lambda name=name, group=group: _write_file(disk, folder, name, group, stop)
        for name, group in _group_by_file(chunks, rank)
    ]
    results = _in_parallel(tasks, stop)
    return WriteResult(
        {name: record for result in results for name, record in result.files.items()},
        [chunk for result in results for chunk in result.chunks],
    )


def _write_file(
    disk: Disk, folder: Path, name: str, chunks: Sequence[TensorChunk], stop: threading.Event
) -> WriteResult:
    stored = []
    try:
        with HashedFile(disk, folder / name) as file:
            for chunk in chunks:
                if stop.is_set():
                    break
                begin = file.tell()
                # A chunk on a device, or one that is not contiguous, is copied here: one copy per thread at most.
                torch.save(chunk.tensor(), cast(IO[bytes], file))
                file.check()
                byte_range = (name, begin, file.tell() - begin)
                stored.append(
                    StoredChunk(chunk.name, chunk.dtype, chunk.shape, chunk.offsets, chunk.sizes, *byte_range)
                )
    except BaseException:
        stop.set()
        raise
    return WriteResult({name: file.record}, stored)


def _group_by_file(chunks: Sequence[TensorChunk], rank: int) -> Iterator[tuple[str, list[TensorChunk]]]:
    """Assign chunks to files; a file has one kind of state (model, optimizer, rng), so weights can be read alone."""
    kinds: dict[str, list[TensorChunk]] = {}
    for chunk in chunks:
        kinds.setdefault(chunk.name.partition(".")[0], []).append(chunk)
    for kind, members in kinds.items():
        group: list[TensorChunk] = []
        size = count = 0
        for chunk in members:
            if group and size + chunk.nbytes > _FILE_BYTES:
                yield f"{kind}__{rank}_{count}.distcp", group
                group, size, count = [], 0, count + 1
            group.append(chunk)
            size += chunk.nbytes
        yield f"{kind}__{rank}_{count}.distcp", group


def _in_parallel(tasks: Sequence[Callable[[], WriteResult]], stop: threading.Event) -> list[WriteResult]:
    """Run all tasks, wait for them, and raise any error. On an interrupt (Ctrl-C), tell the tasks to stop."""
    with ThreadPoolExecutor(_WRITERS) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_READERS = min(8, os.cpu_count() or 1)
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
    """Read regions into new CPU tensors of the saved dtype; CheckpointError if a file contradicts the index."""
    found: list[torch.Tensor] = []
    overlaps: list[_Overlap] = []
    for region in regions:
        saved = index[region.name]
        found.append(torch.empty(region.sizes, dtype=saved.dtype))
        overlaps += _overlaps(region, found[-1], saved)
    try:
        with ThreadPoolExecutor(_READERS) as pool:
            for _ in pool.map(lambda overlap: _read_overlaps(folder, overlap), overlaps):
                pass
    # A damaged file may raise anything: zipfile, struct and torch have errors of their own.
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


def _read_overlaps(folder: Path, overlap: _Overlap) -> None:
    target, sizes = overlap.target, overlap.chunk.sizes
    item = target.element_size()
    with FileIO(folder / overlap.chunk.file) as file:
        start = _elements(file, overlap.chunk, math.prod(sizes) * item)
        if not sizes:
            _fill_overlap(file, start, target)
            return
        row, (first, *columns) = math.prod(sizes[1:]) * item, overlap.begin
        # Whole rows are read into the target without a copy.
        if target.shape[1:] == sizes[1:] and target.is_contiguous():
            _fill_overlap(file, start + first * row, target)
            return
        step = max(1, _BATCH_BYTES // row)
        for done in range(0, target.shape[0], step):
            batch = target[done : done + step]
            rows = torch.empty((batch.shape[0], *sizes[1:]), dtype=target.dtype)
            _fill_overlap(file, start + (first + done) * row, rows)
            for dimension, column in enumerate(columns, start=1):
                rows = rows.narrow(dimension, column, batch.shape[dimension])
            batch.copy_(rows)


def _fill_overlap(file: FileIO, position: int, target: torch.Tensor) -> None:
    # As bytes: numpy has no bfloat16.
    view = memoryview(cast(Any, target.reshape(-1).view(torch.uint8).numpy()))
    file.seek(position)
    while view:
        # A single read returns at most 2 GiB on Linux.
        count = file.readinto(view)
        if not count:
            raise EOFError(f"{file.name!r} ends too early")
        view = view[count:]


def _elements(file: FileIO, chunk: StoredChunk, nbytes: int) -> int:
    """Byte position in the file of a chunk's elements; ValueError if they are not ``nbytes`` there, uncompressed."""
    with ZipFile(cast(Any, _Slice(file, chunk.begin, chunk.length))) as archive:
        records = [record for record in archive.infolist() if record.filename.endswith("/data/0")]
    if len(records) != 1 or records[0].compress_type != ZIP_STORED or records[0].file_size != nbytes:
        raise ValueError(f"{file.name!r} does not hold {nbytes} bytes of elements at {chunk.begin}")
    header = chunk.begin + records[0].header_offset
    file.seek(header)
    # The local header has lengths of its own: its extra field pads the elements to an alignment.
    name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start: int = header + _LOCAL_HEADER.size + name + extra
    # The header comes from the file, which may be damaged.
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
