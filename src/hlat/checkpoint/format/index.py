"""The index of a checkpoint: tensor name -> shape, dtype, and the byte range of each chunk in a file.

    stored chunks of all processes --checks--> .metadata, a pickle in the format of torch.distributed.checkpoint (DCP)
    .metadata --read_pickle--> names, numbers --checks--> StoredTensor by name
    shape, offsets and sizes of chunks --cover_problem--> "", or why they do not cover each element exactly once

The file is never unpickled: ``pickled.py`` reads its plain values, in which torch's classes are only names. The values
are then checked against the sizes of the checkpoint's files, so that a damaged or hostile index can neither cause huge
allocations nor open files outside the checkpoint. Each check takes O(n) or O(n log n) time for an index of n bytes.
"""

import gc
import itertools
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hlat.checkpoint.format.filesystem import Disk, FileRecord, write_file
from hlat.checkpoint.format.pickled import PickledName, PickledObject, read_pickle
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import CheckpointError
from hlat.runtime.progress import blocking_call

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes of a chunk

_DIVIDED = 4  # a tensor may be split along at most this many dimensions; weights have two, stacks of them three


def cover_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """Describe, after the name of a tensor, why chunks do not cover each element exactly once; empty if they do."""
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return f"the number of dimensions of a chunk differs from that of its shape {shape}"
        if any(offset + size > full for full, offset, size in zip(shape, offsets, sizes, strict=True)):
            return f"a chunk lies outside its shape {shape}"
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    if covered != math.prod(shape):
        return f"shape {shape} has {math.prod(shape)} elements, its chunks have {covered}"
    # One chunk inside the tensor with as many elements is the tensor.
    if len(boxes) < 2:
        return ""
    divided = [d for d, full in enumerate(shape) if any(sizes[d] != full for _, sizes in boxes)]
    if len(divided) > _DIVIDED:
        return f"it is split along {len(divided)} dimensions, hlat reads at most {_DIVIDED}"
    wrong = _corner_differences(shape, boxes, divided)
    return f"two of its chunks overlap at {min(wrong)}" if wrong else ""


def _corner_differences(shape: tuple[int, ...], boxes: Sequence[Box], divided: Sequence[int]) -> list[tuple[int, ...]]:
    """Corners whose signed counts differ between the boxes and the full tensor.

    The list is empty if and only if the boxes cover the tensor exactly once. Let f(x) be the number of boxes that
    contain x. The indicator function of [a, b) is H(x - a) - H(x - b), with H the unit step. So f is a sum of products
    of steps, one for each corner of each box, with sign (-1)^(number of upper ends). Such products are linearly
    independent for different corners. Hence f is 1 inside the tensor and 0 elsewhere if and only if the signed corners
    of all boxes add up to those of the full tensor. This takes 2^dimensions operations per box.
    """
    count: Counter[tuple[int, ...]] = Counter()
    full_box = ((0,) * len(shape), shape)
    for (offsets, sizes), weight in itertools.chain(((box, 1) for box in boxes), [(full_box, -1)]):
        corners: list[tuple[tuple[int, ...], int]] = [((), weight)]
        for d in divided:
            begin, end = offsets[d], offsets[d] + sizes[d]
            corners = [(*pair,) for at, sign in corners for pair in (((*at, begin), sign), ((*at, end), -sign))]
        for at, sign in corners:
            count[at] += sign
    return [at for at, number in count.items() if number]


INDEX_NAME = ".metadata"

_DCP = "torch.distributed.checkpoint"
_METADATA = f"{_DCP}.metadata.Metadata"
_METADATA_INDEX = f"{_DCP}.metadata.MetadataIndex"
_TENSOR_STORAGE_METADATA = f"{_DCP}.metadata.TensorStorageMetadata"
_TENSOR_PROPERTIES = f"{_DCP}.metadata.TensorProperties"
_CHUNK_STORAGE_METADATA = f"{_DCP}.metadata.ChunkStorageMetadata"
_STORAGE_INFO = f"{_DCP}.filesystem._StorageInfo"
_DTYPES: dict[str, torch.dtype] = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
}
_KNOWN = frozenset(
    {
        *(_METADATA, _METADATA_INDEX, _TENSOR_STORAGE_METADATA, _TENSOR_PROPERTIES, _CHUNK_STORAGE_METADATA),
        _STORAGE_INFO,
        f"{_DCP}.metadata.StorageMeta",
        f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
        "torch.Size",
        "torch.serialization._get_layout",
        *_DTYPES,
        "builtins.getattr",  # some Python releases (3.11.2, for example) pickle enum members this way
    }
)
_LARGEST = 2**63 - 1  # torch's sizes and strides, and a file's offsets, are 64-bit
_DIMENSIONS = 64  # more than any tensor has


@sendable
@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a tensor and its position on disk: ``length`` bytes of ``file``, starting at byte ``begin``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the full tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and the chunks it was written in, which cover it exactly once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def write_index(disk: Disk, folder: Path, chunks: Iterable[StoredChunk]) -> FileRecord:
    """Check and write the index of the chunks that all processes wrote, and fsync it."""
    # Imported by the process that writes, not at the start of a run: with DTensor and sympy it takes half a second, and
    # much longer on a busy machine.
    with blocking_call():
        from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo  # noqa: PLC0415
        from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            StorageMeta,
            TensorProperties,
            TensorStorageMetadata,
        )

    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    boxes: dict[str, list[Box]] = {}
    for chunk in chunks:
        size, offsets = torch.Size(chunk.shape), torch.Size(chunk.offsets)
        entry = tensors.setdefault(chunk.name, TensorStorageMetadata(TensorProperties(chunk.dtype), size, []))
        assert (entry.size, entry.properties.dtype) == (size, chunk.dtype), f"{chunk.name} is one tensor"
        entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
        boxes.setdefault(chunk.name, []).append((chunk.offsets, chunk.sizes))
        storage[MetadataIndex(chunk.name, offsets)] = _StorageInfo(chunk.file, chunk.begin, chunk.length)
    for name, entry in tensors.items():
        problem = cover_problem(tuple(entry.size), boxes[name])
        assert not problem, f"{name}: {problem}"
    # The index has no paths and no random ids, so equal states give equal bytes.
    index = Metadata(dict(tensors), storage_data=storage, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    return write_file(disk, folder / INDEX_NAME, pickle.dumps(index))


def parse_index(
    data: bytes, file_bytes: Mapping[str, int], wanted: Callable[[str], bool] | None = None
) -> dict[str, StoredTensor]:
    """Tensors of an index by name; CheckpointError if it is damaged, hostile, or contradicts ``file_bytes``.

    Of the index of another program, only tensors with a ``wanted`` name are checked and returned.
    """
    # Such an index has entries that are not tensors, and names classes of other programs; both are passed over.
    is_known = _KNOWN.__contains__ if wanted is None else lambda name: True
    try:
        with _no_collection():
            return _tensors(read_pickle(data, is_known), file_bytes, wanted or (lambda name: True))
    except ValueError as exc:
        raise CheckpointError(f"not a readable index of tensors ({exc})") from exc


@contextmanager
def _no_collection() -> Iterator[None]:
    # The cyclic collector would take longer than creating the millions of objects of an index.
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _tensors(index: Any, file_bytes: Mapping[str, int], wanted: Callable[[str], bool]) -> dict[str, StoredTensor]:
    if not isinstance(index, PickledObject) or index.name != _METADATA:
        kind = index.name if isinstance(index, PickledObject) else type(index).__name__
        raise CheckpointError(f"holds a {kind}, not an index of tensors; nothing was run")
    entries, storage = _fields(index, _METADATA, "state_dict_metadata", "storage_data")
    if type(entries) is not dict or type(storage) is not dict:
        raise CheckpointError("has no tables of tensors and of their positions")
    positions = {_key(key): position for key, position in storage.items() if wanted(_owner(key))}
    chunks = {name: _chunk_list(name, entry) for name, entry in entries.items() if wanted(str(name))}
    # Many tensors may refer to the same list of chunks. This check bounds the work by the length of the file.
    if sum(map(len, chunks.values())) > len(positions):
        raise CheckpointError("it has more chunks of tensors than positions of chunks")
    found = {name: _tensor(name, entries[name], of_tensor, positions, file_bytes) for name, of_tensor in chunks.items()}
    _refuse_shared_bytes(found)
    return found


def _owner(key: Any) -> str:
    (name,) = _fields(key, _METADATA_INDEX, "fqn")
    if type(name) is not str:
        raise CheckpointError("a position belongs to a tensor without a name")
    return name


def _key(key: Any) -> tuple[str, tuple[int, ...]]:
    name = _owner(key)
    (offsets,) = _fields(key, _METADATA_INDEX, "offset")
    return name, _sizes(offsets, "position", name)


def _chunk_list(name: Any, entry: Any) -> list[Any]:
    if type(name) is not str or type(entry) is not PickledObject or entry.name != _TENSOR_STORAGE_METADATA:
        raise CheckpointError(f"entry {_shown(str(name))} is not a tensor")
    (chunks,) = _fields(entry, _TENSOR_STORAGE_METADATA, "chunks")
    if type(chunks) is not list:
        raise CheckpointError(f"tensor {_shown(name)}: has no list of chunks")
    return chunks


def _tensor(
    name: str,
    entry: Any,
    chunks: Sequence[Any],
    positions: Mapping[tuple[str, tuple[int, ...]], Any],
    file_bytes: Mapping[str, int],
) -> StoredTensor:
    shown = f"tensor {_shown(name)}"
    properties, size = _fields(entry, _TENSOR_STORAGE_METADATA, "properties", "size")
    dtype, shape = _dtype(properties, shown), _sizes(size, "shape", name)
    # Zeros count as one: torch computes strides from the other lengths.
    if math.prod(max(1, length) for length in shape) * dtype.itemsize > _LARGEST:
        raise CheckpointError(f"{shown}: impossible shape {shape}: its size in bytes exceeds 2^63 - 1")
    boxes = [_box(chunk, name) for chunk in chunks]
    if problem := cover_problem(shape, boxes):
        raise CheckpointError(f"{shown}: {problem}")
    stored = []
    for offsets, sizes in boxes:
        if (name, offsets) not in positions:
            raise CheckpointError(f"{shown}: no position is recorded for its chunk at {offsets}")
        needed = math.prod(sizes) * dtype.itemsize
        position = _position(shown, positions[name, offsets], needed, file_bytes)
        stored.append(StoredChunk(name, dtype, shape, offsets, sizes, *position))
    return StoredTensor(dtype, shape, tuple(stored))


def _box(chunk: Any, name: str) -> Box:
    offsets, sizes = _fields(chunk, _CHUNK_STORAGE_METADATA, "offsets", "sizes")
    return _sizes(offsets, "chunk", name), _sizes(sizes, "chunk", name)


def _position(shown: str, position: Any, needed: int, file_bytes: Mapping[str, int]) -> tuple[str, int, int]:
    """File name, first byte and length of a chunk."""
    file, begin, length = _fields(position, _STORAGE_INFO, "relative_path", "offset", "length")
    if position.state.get("transform_descriptors"):
        raise CheckpointError(f"{shown}: stored in an unknown form")
    available = file_bytes.get(file) if type(file) is str else None
    if available is None:
        raise CheckpointError(f"{shown}: stored in {_shown(file)}, which is not a file of this checkpoint")
    if not (_is_size(begin) and _is_size(length)) or begin + length > available:
        raise CheckpointError(f"{shown}: reaches beyond the end of {file}")
    # Tensors are stored uncompressed, so the elements must fit in there.
    if needed > length:
        raise CheckpointError(f"{shown}: needs {needed} bytes, the file has {length} for it")
    return file, begin, length


def _refuse_shared_bytes(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError if two chunks overlap in a file: an index could have a small file read many times."""
    chunks = sorted(_chunks(tensors), key=lambda chunk: (chunk.file, chunk.begin))
    for chunk, following in itertools.pairwise(chunks):
        if chunk.file == following.file and chunk.begin + chunk.length > following.begin:
            raise CheckpointError(
                f"tensors {_shown(chunk.name)} and {_shown(following.name)} lie on the same bytes of {chunk.file}"
            )


def _chunks(tensors: Mapping[str, StoredTensor]) -> Iterator[StoredChunk]:
    return (chunk for tensor in tensors.values() for chunk in tensor.chunks)


def _fields(made: Any, kind: str, *names: str) -> list[Any]:
    """Fields of an object of one of DCP's classes; CheckpointError if it is another, or lacks one."""
    if type(made) is not PickledObject or made.name != kind or type(made.state) is not dict:
        raise CheckpointError(f"expected a {kind.rpartition('.')[2]}, found something else")
    try:
        return [made.state[name] for name in names]
    except KeyError as absent:
        raise CheckpointError(f"a {kind.rpartition('.')[2]} without {absent}") from None


def _sizes(value: Any, kind: str, name: str) -> tuple[int, ...]:
    """Numbers of a torch.Size; ``kind`` names the value in the error."""
    numbers = (
        value.arguments[0] if type(value) is PickledObject and value.name == "torch.Size" and value.arguments else None
    )
    if type(numbers) is not tuple or len(numbers) > _DIMENSIONS or not all(map(_is_size, numbers)):
        raise CheckpointError(
            f"tensor {_shown(name)}: impossible {kind}: it takes at most {_DIMENSIONS} whole numbers from 0 to 2^63 - 1"
        )
    return numbers


def _is_size(value: Any) -> bool:
    # Not isinstance: bool is an int.
    return type(value) is int and 0 <= value <= _LARGEST


def _dtype(properties: Any, shown: str) -> torch.dtype:
    # DCP stores the properties as a tuple: first the data type, then the layout, which has to be dense.
    is_kind = type(properties) is PickledObject and properties.name == _TENSOR_PROPERTIES
    state = properties.state if is_kind else None
    dtype, layout = state[:2] if type(state) is tuple and len(state) > 1 else (None, None)
    found = _DTYPES.get(dtype.text) if type(dtype) is PickledName else None
    if found is None:
        raise CheckpointError(f"{shown}: impossible dtype")
    if type(layout) is not PickledObject or layout.arguments != ("torch.strided",):
        raise CheckpointError(f"{shown}: stored in an unknown memory layout")
    return found


def _shown(name: Any) -> str:
    """Format a name for a message: shortened, and without control characters."""
    text = name if type(name) is str else type(name).__name__
    text = text if len(text) <= 200 else text[:200] + "..."
    return text if text.isprintable() else repr(text)
