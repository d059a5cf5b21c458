"""The index of a checkpoint's tensors: name -> shape, dtype, and which bytes of which file.

    where the blocks of all processes lie --checks--> .metadata, a pickle as torch.distributed.checkpoint (DCP) has it
    .metadata --read_pickle--> names, numbers --checks--> StoredTensor by name

A tensor may be saved in several blocks (DCP calls them chunks); together they are the tensor, each element once.

The file is never unpickled: ``pickled.py`` reads the plain values of it, in which torch's classes are names and no
more. What they say is then held against the files they speak of, so that nothing absurd is allocated and nothing
outside the checkpoint is opened. Each check takes time in proportion to the file, or n log n.
"""

import gc
import itertools
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hlat.checkpoint.format.covering import Box, cover_problem
from hlat.checkpoint.format.filesystem import Disk, FileRecord, write_file
from hlat.checkpoint.format.pickled import PickledName, PickledObject, read_pickle
from hlat.runtime import CheckpointError
from hlat.runtime.distributed import sendable

INDEX_NAME = ".metadata"

_DCP = "torch.distributed.checkpoint"
_METADATA = f"{_DCP}.metadata.Metadata"
_METADATA_INDEX = f"{_DCP}.metadata.MetadataIndex"
_TENSOR_STORAGE_METADATA = f"{_DCP}.metadata.TensorStorageMetadata"
_TENSOR_PROPERTIES = f"{_DCP}.metadata.TensorProperties"
_CHUNK_STORAGE_METADATA = f"{_DCP}.metadata.ChunkStorageMetadata"
_STORAGE_INFO = f"{_DCP}.filesystem._StorageInfo"
_KNOWN = frozenset(
    {
        *(_METADATA, _METADATA_INDEX, _TENSOR_STORAGE_METADATA, _TENSOR_PROPERTIES, _CHUNK_STORAGE_METADATA),
        _STORAGE_INFO,
        f"{_DCP}.metadata.StorageMeta",
        f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
        "torch.Size",
        "torch.serialization._get_layout",
        "builtins.getattr",  # some releases of Python (3.11.2 is one) pickle the members of an enum so
    }
)
_DTYPES: dict[str, torch.dtype] = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
}
_LARGEST = 2**63 - 1  # torch's sizes and strides, and a file's offsets, are 64-bit
_DIMENSIONS = 64  # more than any tensor has


@sendable
@dataclass(frozen=True)
class StoredChunk:
    """A block of a tensor and where it was written: ``length`` bytes from ``begin`` on in ``file``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and the blocks that it was written in; together they are the tensor, each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def write_index(disk: Disk, folder: Path, chunks: Iterable[StoredChunk]) -> FileRecord:
    """Write the index of what all processes wrote, durably.

    Raises:
        OSError: the disk refused.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    boxes: dict[str, list[Box]] = {}
    for chunk in chunks:
        size, offsets = torch.Size(chunk.shape), torch.Size(chunk.offsets)
        entry = tensors.setdefault(chunk.name, TensorStorageMetadata(TensorProperties(chunk.dtype), size, []))
        assert (entry.size, entry.properties.dtype) == (size, chunk.dtype), f"{chunk.name} is one tensor"
        entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
        boxes.setdefault(chunk.name, []).append((chunk.offsets, chunk.sizes))
        places[MetadataIndex(chunk.name, offsets)] = _StorageInfo(chunk.file, chunk.begin, chunk.length)
    for name, entry in tensors.items():
        problem = cover_problem(tuple(entry.size), boxes[name])
        assert not problem, f"{name}: {problem}"
    # No paths and no random ids: the same state gives the same index.
    index = Metadata(dict(tensors), storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    return write_file(disk, folder / INDEX_NAME, pickle.dumps(index))


def read_index(folder: Path, file_bytes: Mapping[str, int]) -> dict[str, StoredTensor]:
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
        return parse_index(path.read_bytes(), file_bytes)
    except CheckpointError as exc:
        raise CheckpointError(f"{path}: {exc}") from None
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read ({exc.strerror})") from exc


def parse_index(data: bytes, file_bytes: Mapping[str, int]) -> dict[str, StoredTensor]:
    """``read_index`` from the bytes of the file."""
    try:
        with _no_collection():
            return _tensors(read_pickle(data, _is_known), file_bytes)
    except ValueError as exc:
        raise CheckpointError(f"not a readable index of tensors ({exc})") from exc


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector: with millions of new objects, that takes longer than to make them."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _is_known(name: str) -> bool:
    return name in _KNOWN or name in _DTYPES


def _tensors(index: Any, file_bytes: Mapping[str, int]) -> dict[str, StoredTensor]:
    if not isinstance(index, PickledObject) or index.name != _METADATA:
        kind = index.name if isinstance(index, PickledObject) else type(index).__name__
        raise CheckpointError(f"holds a {kind}, not an index of tensors; nothing was run")
    entries, storage = _fields(index, _METADATA, "state_dict_metadata", "storage_data")
    if type(entries) is not dict or type(storage) is not dict:
        raise CheckpointError("has no tables of tensors and of where they are")
    places = {_key(key): place for key, place in storage.items()}
    pieces = {name: _pieces(name, entry) for name, entry in entries.items()}
    # A list may be named by many tensors: this bounds what is done for them by the length of the file.
    if sum(map(len, pieces.values())) > len(places):
        raise CheckpointError("it has more pieces of tensors than places where they are")
    found = {name: _tensor(name, entries[name], chunks, places, file_bytes) for name, chunks in pieces.items()}
    _refuse_shared_bytes(found)
    return found


def _key(key: Any) -> tuple[str, tuple[int, ...]]:
    name, offsets = _fields(key, _METADATA_INDEX, "fqn", "offset")
    if type(name) is not str:
        raise CheckpointError("a place is of a tensor without a name")
    return name, _sizes(offsets, "a place", name)


def _pieces(name: Any, entry: Any) -> list[Any]:
    if type(name) is not str or type(entry) is not PickledObject or entry.name != _TENSOR_STORAGE_METADATA:
        raise CheckpointError(f"entry {_shown(str(name))} is not a tensor")
    (chunks,) = _fields(entry, _TENSOR_STORAGE_METADATA, "chunks")
    if type(chunks) is not list:
        raise CheckpointError(f"tensor {_shown(name)}: has no list of pieces")
    return chunks


def _tensor(
    name: str,
    entry: Any,
    chunks: Sequence[Any],
    places: Mapping[tuple[str, tuple[int, ...]], Any],
    file_bytes: Mapping[str, int],
) -> StoredTensor:
    shown = f"tensor {_shown(name)}"
    properties, size = _fields(entry, _TENSOR_STORAGE_METADATA, "properties", "size")
    dtype, shape = _dtype(properties, shown), _sizes(size, "shape", name)
    if math.prod(max(1, length) for length in shape) * dtype.itemsize > _LARGEST:
        raise CheckpointError(f"{shown}: impossible shape {shape}: it has more bytes than can be counted")
    boxes = [_box(chunk, name) for chunk in chunks]
    if problem := cover_problem(shape, boxes):
        raise CheckpointError(f"{shown}: {problem}")
    stored = []
    for offsets, sizes in boxes:
        if (name, offsets) not in places:
            raise CheckpointError(f"{shown}: nothing says where its piece at {offsets} is")
        needed = math.prod(sizes) * dtype.itemsize
        place = _place(shown, places[name, offsets], needed, file_bytes)
        stored.append(StoredChunk(name, dtype, shape, offsets, sizes, *place))
    return StoredTensor(dtype, shape, tuple(stored))


def _box(chunk: Any, name: str) -> Box:
    offsets, sizes = _fields(chunk, _CHUNK_STORAGE_METADATA, "offsets", "sizes")
    return _sizes(offsets, "a piece", name), _sizes(sizes, "a piece", name)


def _place(shown: str, place: Any, needed: int, file_bytes: Mapping[str, int]) -> tuple[str, int, int]:
    """File, first byte, and length. Tensors are stored uncompressed: a piece is never larger than its bytes there."""
    file, begin, length = _fields(place, _STORAGE_INFO, "relative_path", "offset", "length")
    if place.state.get("transform_descriptors"):
        raise CheckpointError(f"{shown}: stored in a form that is not known")
    available = file_bytes.get(file) if type(file) is str else None
    if available is None:
        raise CheckpointError(f"{shown}: stored in {_shown(file)}, which is no file of this checkpoint")
    if not (_is_size(begin) and _is_size(length)) or begin + length > available:
        raise CheckpointError(f"{shown}: reaches beyond the end of {file}")
    if needed > length:
        raise CheckpointError(f"{shown}: claims {needed} bytes, the file holds {length} for it")
    return file, begin, length


def _refuse_shared_bytes(tensors: Mapping[str, StoredTensor]) -> None:
    """Two pieces never lie on the same bytes: a small file would be read as often as an index likes."""
    chunks = sorted(_chunks(tensors), key=lambda chunk: (chunk.file, chunk.begin))
    for chunk, following in itertools.pairwise(chunks):
        if chunk.file == following.file and chunk.begin + chunk.length > following.begin:
            raise CheckpointError(
                f"tensors {_shown(chunk.name)} and {_shown(following.name)} lie on the same bytes of {chunk.file}"
            )


def _chunks(tensors: Mapping[str, StoredTensor]) -> Iterator[StoredChunk]:
    return (chunk for tensor in tensors.values() for chunk in tensor.chunks)


def _fields(made: Any, kind: str, *names: str) -> list[Any]:
    """Fields of an object of one of DCP's classes."""
    if type(made) is not PickledObject or made.name != kind or type(made.state) is not dict:
        raise CheckpointError(f"something else stands where a {kind.rpartition('.')[2]} belongs")
    try:
        return [made.state[name] for name in names]
    except KeyError as absent:
        raise CheckpointError(f"a {kind.rpartition('.')[2]} without {absent}") from None


def _sizes(value: Any, kind: str, name: str) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    numbers = (
        value.arguments[0] if type(value) is PickledObject and value.name == "torch.Size" and value.arguments else None
    )
    if type(numbers) is not tuple or len(numbers) > _DIMENSIONS or not all(map(_is_size, numbers)):
        raise CheckpointError(
            f"tensor {_shown(name)}: impossible {kind}: it takes at most {_DIMENSIONS} whole numbers from 0 to 2^63 - 1"
        )
    return numbers


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _dtype(properties: Any, shown: str) -> torch.dtype:
    """The dtype of a dense tensor: the first of what DCP keeps of its properties, beside its layout."""
    is_kind = type(properties) is PickledObject and properties.name == _TENSOR_PROPERTIES
    state = properties.state if is_kind else None
    dtype, layout = state[:2] if type(state) is tuple and len(state) > 1 else (None, None)
    found = _DTYPES.get(dtype.text) if type(dtype) is PickledName else None
    if found is None:
        raise CheckpointError(f"{shown}: impossible dtype")
    if type(layout) is not PickledObject or layout.arguments != ("torch.strided",):
        raise CheckpointError(f"{shown}: stored in a layout that is not known")
    return found


def _shown(name: Any) -> str:
    """A name in a message: short, and without characters that a terminal would obey."""
    text = name if type(name) is str else type(name).__name__
    text = text if len(text) <= 200 else text[:200] + "..."
    return text if text.isprintable() else repr(text)
