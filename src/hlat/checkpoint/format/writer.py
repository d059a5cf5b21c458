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
from hlat.checkpoint.format.index import StoredBlock
from hlat.checkpoint.format.tensor_chunks import Block
from hlat.runtime.distributed import sendable

_FILE_BYTES = 1 << 30  # files are filled to about this, so that they can be hashed and read in parallel
_THREADS = min(8, os.cpu_count() or 1)


@sendable
@dataclass(frozen=True)
class Written:
    """What a process wrote: its files, and the blocks in them."""

    files: dict[str, FileRecord]
    blocks: list[StoredBlock]


def write_blocks(disk: Disk, folder: Path, blocks: Sequence[Block], rank: int) -> Written:
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
        for name, group in _groups(blocks, rank)
    ]
    parts = _in_parallel(tasks, stop)
    return Written(
        {name: record for part in parts for name, record in part.files.items()},
        [block for part in parts for block in part.blocks],
    )


def _write_file(disk: Disk, folder: Path, name: str, blocks: Sequence[Block], stop: threading.Event) -> Written:
    stored = []
    try:
        with HashedFile(disk, folder / name) as file:
            for block in blocks:
                if stop.is_set():
                    break
                begin = file.tell()
                torch.save(block.tensor(), cast(IO[bytes], file))
                file.check()
                place = (name, begin, file.tell() - begin)
                stored.append(StoredBlock(block.name, block.dtype, block.shape, block.offsets, block.sizes, *place))
    except BaseException:
        stop.set()
        raise
    return Written({name: file.record}, stored)


def _groups(blocks: Sequence[Block], rank: int) -> Iterator[tuple[str, list[Block]]]:
    """Files to write: one kind of state (model, optimizer, rng) per file, so that weights are read alone."""
    kinds: dict[str, list[Block]] = {}
    for block in blocks:
        kinds.setdefault(block.name.partition(".")[0], []).append(block)
    for kind, members in kinds.items():
        group: list[Block] = []
        size = count = 0
        for block in members:
            if group and size + block.nbytes > _FILE_BYTES:
                yield f"{kind}__{rank}_{count}.distcp", group
                group, size, count = [], 0, count + 1
            group.append(block)
            size += block.nbytes
        yield f"{kind}__{rank}_{count}.distcp", group


def _in_parallel(tasks: Sequence[Callable[[], Written]], stop: threading.Event) -> list[Written]:
    """Run all tasks; tell them to stop when this thread is interrupted (Ctrl-C), wait for them, and raise any error."""
    with ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
