"""Blocks of tensors to files, in the format of torch.distributed.checkpoint (DCP).

    blocks of a process --groups--> files of its own, written and hashed in parallel --> where each block lies

Each block is in the file as torch.save writes a tensor, whose index entry (``index.py``) says at which bytes: DCP's own
reader reads such files too. No process waits for another one here.
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
from hlat.runtime.distributed import sendable

_FILE_BYTES = 1 << 30  # files are filled to about this, so that they can be hashed and read in parallel
_THREADS = min(8, os.cpu_count() or 1)


@sendable
@dataclass(frozen=True)
class WriteResult:
    """What a process wrote: its files, and the blocks in them."""

    files: dict[str, FileRecord]
    chunks: list[StoredChunk]


def write_chunks(disk: Disk, folder: Path, chunks: Sequence[TensorChunk], rank: int) -> WriteResult:
    """Write the blocks of a process into an existing folder, durably, but for the folder's entries.

    At most one block per thread is copied at a time: one that is on a device, or not contiguous.

    Args:
        disk: where its operations go.
        folder: that of the checkpoint.
        blocks: those that this process is to write.
        rank: goes into the names of the files, so that no two processes write the same.

    Raises:
        OSError: the disk refused. What was written stays for the caller to remove.
    """
    stop = threading.Event()
    tasks = [
        lambda name=name, group=group: _write_file(disk, folder, name, group, stop)
        for name, group in _groups(chunks, rank)
    ]
    parts = _in_parallel(tasks, stop)
    return WriteResult(
        {name: record for part in parts for name, record in part.files.items()},
        [chunk for part in parts for chunk in part.chunks],
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
                place = (name, begin, file.tell() - begin)
                stored.append(StoredChunk(chunk.name, chunk.dtype, chunk.shape, chunk.offsets, chunk.sizes, *place))
    except BaseException:
        stop.set()
        raise
    return WriteResult({name: file.record}, stored)


def _groups(chunks: Sequence[TensorChunk], rank: int) -> Iterator[tuple[str, list[TensorChunk]]]:
    """Files to write: one kind of state (model, optimizer, rng) per file, so that weights are read alone."""
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
    """Run all tasks; tell them to stop when this thread is interrupted (Ctrl-C), wait for them, and raise any error."""
    with ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
