"""Write tensor chunks to files, in the format of torch.distributed.checkpoint (DCP).

    chunks of a process --groups--> its files, written and hashed in parallel --> file and byte range of each chunk

A chunk is stored in the bytes that torch.save writes for a tensor. The index (``index.py``) records their position, so
that DCP's own reader can read these files too. Nothing here waits for another process.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch

from hlat.checkpoint.format.filesystem import Disk, FileRecord, HashedFile
from hlat.checkpoint.format.index import StoredChunk
from hlat.checkpoint.format.tensor_chunks import TensorChunk
from hlat.runtime.distributed.sendable_types import sendable

_FILE_BYTES = 1 << 30  # approximate file size: several files can be hashed and read in parallel
_THREADS = min(8, os.cpu_count() or 1)


@sendable
@dataclass(frozen=True)
class WriteResult:
    """Files that a process wrote, and the chunks in them."""

    files: dict[str, FileRecord]
    chunks: list[StoredChunk]


def write_chunks(disk: Disk, folder: Path, chunks: Sequence[TensorChunk], rank: int) -> WriteResult:
    """Write the chunks of a process into an existing folder and fsync the files, but not the folder itself.

    A chunk on a device, or one that is not contiguous, is copied first; there is at most one such copy per thread.

    Args:
        disk: file-system operations.
        folder: folder of the checkpoint.
        chunks: chunks to be written by this process.
        rank: rank of this process; part of the file names, so that no two processes write the same file.

    Raises:
        OSError: a file-system operation failed. The caller must remove the files written so far.
    """
    stop = threading.Event()
    tasks = [
        lambda name=name, group=group: _write_file(disk, folder, name, group, stop)
        for name, group in _groups(chunks, rank)
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


def _groups(chunks: Sequence[TensorChunk], rank: int) -> Iterator[tuple[str, list[TensorChunk]]]:
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
    with ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
