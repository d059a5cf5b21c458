"""Tensors to files and back, in the format of torch.distributed.checkpoint (DCP).

    names, tensors --plan--> groups of files, written and hashed in parallel --> .metadata, the index
    index, targets --plan--> the bytes each target needs, read in parallel --> targets, in place

DCP does the planning, so that sharded tensors will be written by many processes and read into any other layout in
the same format. The bytes of tensors are torch.save's; DCP's reader of torch 2.13 reads them back with
``weights_only=True``.
"""

import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hlat.checkpoint.disk import Disk, FileRecord, HashedFile, write_file
from hlat.checkpoint.index import INDEX_NAME
from hlat.runtime import CheckpointError

_FILE_BYTES = 1 << 30  # files are filled to about this, so that they can be hashed and read in parallel
_THREADS = min(8, os.cpu_count() or 1)


def write_tensors(disk: Disk, folder: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, FileRecord]:
    """Write tensors into an existing folder, durably.

    At most one tensor per thread is copied at a time: one that is on a device, or a view of a larger tensor.

    Returns:
        Name and record of every file written, the index among them.

    Raises:
        OSError: the disk refused. What was written stays for the caller to remove.
    """
    writer = _Writer(disk, folder)
    with _quiet(), _unwrapped():
        dcp_save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
    return writer.records


def read_tensors(folder: Path, index: Metadata, targets: Mapping[str, torch.Tensor]) -> None:
    """Fill ``targets`` in place. Names, shapes and dtypes must be those of the index.

    Raises:
        CheckpointError: the files do not hold what the index says.
    """
    try:
        with _quiet(), _unwrapped(), torch.no_grad():
            dcp_load(
                {name: target.detach() for name, target in targets.items()},
                storage_reader=_Reader(folder, index),
                planner=_Planner(flatten_state_dict=False),
                no_dist=not dist.is_initialized(),
            )
    except Exception as exc:
        raise CheckpointError(f"{folder}: its tensors cannot be read ({type(exc).__name__}: {exc})") from exc


class _Writer(FileSystemWriter):
    """DCP's file writer, with hashing and with errors that reach the caller from any thread."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        super().__init__(folder)
        self._disk = disk
        self._folder = folder
        self._stop = threading.Event()
        self.records: dict[str, FileRecord] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tasks = [
            lambda name=name, items=items: self._write_group(name, items, planner)
            for name, items in _groups(plan.items, plan.storage_data.prefix)
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for results in _in_parallel(tasks, self._stop) for result in results])
        return done

    def _write_group(self, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results = []
        try:
            with HashedFile(self._disk, self._folder / name) as file:
                for item in items:
                    if self._stop.is_set():
                        break
                    begin = file.tell()
                    torch.save(_compact(planner.resolve_data(item)), cast(IO[bytes], file))
                    file.check()
                    length = file.tell() - begin
                    results.append(WriteResult(item.index, length, _StorageInfo(name, begin, length)))
        except BaseException:
            self._stop.set()
            raise
        self.records[name] = file.record
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = StorageMeta()  # no paths and no random ids: the same state gives the same index
        self.records[INDEX_NAME] = write_file(self._disk, self._folder / INDEX_NAME, pickle.dumps(metadata))


class _Reader(FileSystemReader):
    """DCP's file reader, given an index that was checked already, reading in parallel."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        shares = [LoadPlan(plan.items[first::_THREADS]) for first in range(min(_THREADS, len(plan.items)))]
        read = super().read_data
        with ThreadPoolExecutor(_THREADS) as pool:
            for future in [pool.submit(read, share, planner) for share in shares]:
                future.result()
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _Planner(DefaultLoadPlanner):
    """Loads tensors only: DCP would read any other entry with an unrestricted unpickler."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor")


def _groups(items: Sequence[WriteItem], prefix: str) -> Iterator[tuple[str, list[WriteItem]]]:
    """Files to write: one kind of state (model, optimizer, rng) per file, so that weights are read alone."""
    kinds: dict[str, list[WriteItem]] = {}
    for item in items:
        kinds.setdefault(item.index.fqn.partition(".")[0], []).append(item)
    for kind, members in kinds.items():
        group: list[WriteItem] = []
        size = count = 0
        for item in members:
            if group and size + _item_bytes(item) > _FILE_BYTES:
                yield f"{kind}{prefix}{count}.distcp", group
                group, size, count = [], 0, count + 1
            group.append(item)
            size += _item_bytes(item)
        yield f"{kind}{prefix}{count}.distcp", group


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None, "only tensors are saved"
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _compact(tensor: torch.Tensor | BytesIO) -> torch.Tensor:
    """The tensor on the CPU with a storage of its own, because torch.save writes whole storages."""
    assert isinstance(tensor, torch.Tensor), "only tensors are saved"
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _in_parallel(tasks: Sequence[Callable[[], list[WriteResult]]], stop: threading.Event) -> list[list[WriteResult]]:
    """Run all tasks; tell them to stop when this thread is interrupted (Ctrl-C), wait for them, and raise any error."""
    with ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _quiet() -> Iterator[None]:
    """A single process is not an accident: no warning about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def _unwrapped() -> Iterator[None]:
    """DCP gathers every error, an interrupt too, into one of its own; raise the first error itself."""
    try:
        yield
    except CheckpointException as exc:
        first, _ = next(iter(exc.failures.values()))
        raise first from None
