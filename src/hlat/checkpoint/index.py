"""The index of a checkpoint's tensors: name -> shape, dtype, and which bytes of which file.

    .metadata (a pickle, as torch.distributed.checkpoint writes it) --restricted unpickler--> Metadata --checks--> use

The file is never handed to ``pickle.load``. The unpickler below resolves only the data classes that make up an index;
any other name in the file is refused before anything is called. An index that passes is then held against the files
it speaks of, so that nothing absurd is allocated and nothing outside the checkpoint is opened.
"""

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

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
    covered = 0
    for chunk in entry.chunks:
        spans = list(zip(entry.size, chunk.offsets, chunk.sizes, strict=True))
        if any(offset < 0 or size < 0 or offset + size > full for full, offset, size in spans):
            raise CheckpointError(f"tensor {name}: a piece lies outside its shape {tuple(entry.size)}")
        elements = math.prod(chunk.sizes)
        covered += elements
        _check_place(
            name, storage[MetadataIndex(name, chunk.offsets)], elements * entry.properties.dtype.itemsize, file_bytes
        )
    if covered != math.prod(entry.size):
        raise CheckpointError(
            f"tensor {name}: shape {tuple(entry.size)} has {math.prod(entry.size)} elements, its pieces have {covered}"
        )


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
