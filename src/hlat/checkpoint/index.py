"""The index of a checkpoint's tensors: name -> shape, dtype, and which bytes of which file.

    where the blocks of all processes lie --checks--> .metadata, a pickle as torch.distributed.checkpoint (DCP) has it
    .metadata --restricted unpickler--> Metadata --checks--> use

A tensor may be saved in several blocks (DCP calls them chunks); together they are the tensor, each element once.

The file is never handed to ``pickle.load``. The unpickler below resolves only the data classes that make up an index;
any other name in the file is refused before anything is called. An index that passes is then held against the files
it speaks of, so that nothing absurd is allocated and nothing outside the checkpoint is opened.
"""

import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hlat.checkpoint.disk import Disk, FileRecord, write_file
from hlat.runtime import CheckpointError

INDEX_NAME = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = frozenset(
    {
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        # a table look-up from "torch.strided" to the layout object
        ("torch.serialization", "_get_layout"),
    }
)


@dataclass(frozen=True)
class StoredBlock:
    """A block of a tensor and where it was written: ``length`` bytes from ``begin`` on in ``file``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


def write_index(disk: Disk, folder: Path, blocks: Iterable[StoredBlock]) -> FileRecord:
    """Write the index of what all processes wrote, durably.

    Raises:
        OSError: the disk refused.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for block in blocks:
        size, offsets = torch.Size(block.shape), torch.Size(block.offsets)
        entry = tensors.setdefault(block.name, TensorStorageMetadata(TensorProperties(block.dtype), size, []))
        assert (entry.size, entry.properties.dtype) == (size, block.dtype), f"{block.name} is one tensor"
        entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(block.sizes)))
        places[MetadataIndex(block.name, offsets)] = _StorageInfo(block.file, block.begin, block.length)
    for name, entry in tensors.items():
        problem = _cover_problem(entry.size, entry.chunks)
        assert not problem, f"{name}: {problem}"
    # No paths and no random ids: the same state gives the same index.
    index = Metadata(dict(tensors), storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    return write_file(disk, folder / INDEX_NAME, pickle.dumps(index))


def _cover_problem(shape: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> str:
    """What keeps blocks from being a tensor, each element once; empty if nothing does."""
    for chunk in chunks:
        spans = list(zip(shape, chunk.offsets, chunk.sizes, strict=True))
        if any(offset < 0 or size < 0 or offset + size > full for full, offset, size in spans):
            return f"a piece lies outside its shape {tuple(shape)}"
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if covered != math.prod(shape):
        return f"shape {tuple(shape)} has {math.prod(shape)} elements, its pieces have {covered}"
    begun: list[ChunkStorageMetadata] = []  # those that reach to the row where the next one begins
    several = [chunk for chunk in chunks if len(chunks) > 1 and chunk.sizes.numel() > 0]
    for chunk in sorted(several, key=lambda chunk: tuple(chunk.offsets)):
        begun = [other for other in begun if other.offsets[0] + other.sizes[0] > chunk.offsets[0]]
        if any(_overlap(chunk, other) for other in begun):
            return f"two of its pieces overlap at {tuple(chunk.offsets)}"
        begun.append(chunk)
    return ""


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + n and b < a + m for a, m, b, n in spans)


def _memory_format(owner: Any, name: str) -> Any:
    """What ``getattr`` is for in an index: some releases of Python (3.11.2 is one) pickle the members of an enum so."""
    if owner is not _MEM_FORMAT_ENCODING:
        raise CheckpointError(f"it asks for builtins.getattr of {owner!r}, which no index needs; nothing was run")
    return _MEM_FORMAT_ENCODING[name]


class _IndexUnpickler(pickle.Unpickler):
    """Resolves the classes of an index and torch's dtypes; refuses every other name.

    BytesStorageMetadata is left out on purpose: torch reads such entries with an unrestricted unpickler, and a
    checkpoint of ours holds tensors only.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        raise CheckpointError(f"it asks for {module}.{name}, which no index of tensors needs; nothing was run")


def read_index(folder: Path, file_bytes: Mapping[str, int]) -> Metadata:
    """Read and check the index of a checkpoint folder.

    Args:
        folder: the checkpoint.
        file_bytes: size in bytes of every file that the index may refer to, from the manifest.

    Raises:
        CheckpointError: the file is missing, is no index, names something that is not allowed, or does not agree
            with the files.
    """
    path = folder / INDEX_NAME
    try:
        with path.open("rb") as file:
            index = _check(_IndexUnpickler(file).load(), file_bytes)
    except CheckpointError as exc:
        raise CheckpointError(f"{path}: {exc}") from None
    except Exception as exc:  # a damaged pickle can raise anything; all of it means the same
        raise CheckpointError(f"{path}: not a readable index of tensors ({type(exc).__name__}: {exc})") from exc
    return index


def _check(index: Any, file_bytes: Mapping[str, int]) -> Metadata:
    if not isinstance(index, Metadata):
        raise CheckpointError(f"holds a {type(index).__name__}, not an index of tensors")
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"entry {name!r} is not a tensor")
        _check_tensor(name, entry, index.storage_data, file_bytes)
    return index


def _check_tensor(name: str, entry: TensorStorageMetadata, storage: Any, file_bytes: Mapping[str, int]) -> None:
    if not isinstance(entry.properties.dtype, torch.dtype) or min(entry.size, default=0) < 0:
        raise CheckpointError(f"tensor {name}: impossible dtype or shape")
    if problem := _cover_problem(entry.size, entry.chunks):
        raise CheckpointError(f"tensor {name}: {problem}")
    for chunk in entry.chunks:
        needed = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
        _check_place(name, storage[MetadataIndex(name, chunk.offsets)], needed, file_bytes)


def _check_place(name: str, place: Any, needed: int, file_bytes: Mapping[str, int]) -> None:
    """Tensors are stored uncompressed, so that a piece can never be larger than its bytes in the file."""
    if not isinstance(place, _StorageInfo) or place.transform_descriptors:
        raise CheckpointError(f"tensor {name}: stored in a form that is not known")
    available = file_bytes.get(place.relative_path)
    if available is None:
        raise CheckpointError(f"tensor {name}: stored in {place.relative_path!r}, which is no file of this checkpoint")
    if place.offset < 0 or place.length < 0 or place.offset + place.length > available:
        raise CheckpointError(f"tensor {name}: reaches beyond the end of {place.relative_path}")
    if needed > place.length:
        raise CheckpointError(f"tensor {name}: claims {needed} bytes, the file holds {place.length} for it")
