"""Law 9: a crafted index has no side effects, and is read or refused in time proportional to its size."""

import itertools
import math
import pickle
import random
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hlat.checkpoint.format.index import cover_problem
from hlat.checkpoint.format.pickled import read_pickle
from hlat.checkpoint.protocol.reader import open_checkpoint, verify_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.runtime.errors import CheckpointError
from tests.checkpoint.format.test_hostile import assert_refused, seal, write_index
from tests.support.checkpoint.saved_states import save

METADATA = b"torch.distributed.checkpoint.metadata"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(CheckpointStore(tmp_path / "checkpoints", 1), 1)


def attribute_on(target: bytes) -> bytes:
    """Pickle that sets an attribute of the object that ``target`` puts on the stack, by BUILD with slot state."""
    name, value = b"X\x03\x00\x00\x00pwn", b"K\x01"
    return b"\x80\x02" + target + b"N}" + name + value + b"s\x86b."


TARGETS = {
    "a class": b"c" + METADATA + b"\nMetadata\n",
    "a frozen class": b"c" + METADATA + b"\nMetadataIndex\n",
    "torch.Size": b"ctorch\nSize\n",
    "a function": b"ctorch.serialization\n_get_layout\n",
    "an enum": b"c" + METADATA + b"\n_MEM_FORMAT_ENCODING\n",
    "a member of it": b"c" + METADATA + b"\n_MEM_FORMAT_ENCODING\nK\x00\x85R",
    "a dtype": b"ctorch\nfloat32\n",
    "an object": b"c" + METADATA + b"\nMetadata\n)\x81",
}


@pytest.mark.parametrize("target", TARGETS)
def test_no_attribute_of_torch_is_set(folder: Path, target: str) -> None:
    import torch.distributed.checkpoint.metadata as theirs  # noqa: PLC0415

    (folder / ".metadata").write_bytes(attribute_on(TARGETS[target]))
    seal(folder)
    assert_refused(folder, ".metadata")
    contiguous = theirs._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    holders = [Metadata, MetadataIndex, torch.Size, torch.serialization._get_layout, type(contiguous), contiguous]
    assert not [holder for holder in holders if hasattr(holder, "pwn")]


def test_a_plain_unpickler_sets_the_attribute() -> None:
    """Check of the test itself: the attribute of torch's class changes."""
    pickle.loads(attribute_on(TARGETS["a class"]))
    assert Metadata.pwn == 1  # type: ignore[attr-defined]
    del Metadata.pwn  # type: ignore[attr-defined]


def raw_index(size: Any, offsets: Any = (0, 0), sizes: Any = None, begin: Any = 0, length: Any = 640) -> bytes:
    """Pickle an index of one tensor with arbitrary values as sizes, which torch.Size itself would refuse."""

    class Size:
        def __init__(self, numbers: Any) -> None:
            self.numbers = numbers

        def __reduce__(self) -> Any:
            return torch.Size, (self.numbers,)

    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([1]), [])
    entry.size = Size(size)  # type: ignore[assignment]
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    chunk.offsets = Size(offsets)  # type: ignore[assignment]
    chunk.sizes = Size(size if sizes is None else sizes)  # type: ignore[assignment]
    entry.chunks = [chunk]
    key = MetadataIndex("model.a")
    object.__setattr__(key, "offset", Size(offsets))
    return pickle.dumps(
        Metadata({"model.a": entry}, storage_data={key: _StorageInfo("model__0_0.distcp", begin, length)})
    )


INVALID_SIZES = [
    (math.inf,),
    (2.0, 2.0),
    (True, True),
    (-1, -1),
    (2**70, 0),
    (2**62, 2**62, 0),
    ("2", "2"),
    (None, 2),
    [2, 2],
    4,
    ((2, 2),),
    (1,) * 1000,
]


@pytest.mark.parametrize("size", INVALID_SIZES, ids=lambda value: repr(value)[:20])
def test_sizes_must_be_integers(folder: Path, size: Any) -> None:
    offsets = (0,) * len(size) if isinstance(size, tuple) else (0,)
    (folder / ".metadata").write_bytes(raw_index(size, offsets))
    seal(folder)
    assert_refused(folder, "impossible")


@pytest.mark.parametrize("invalid", [2.0, True, -1, 2**70, "0"])
@pytest.mark.parametrize("where", ["offsets", "sizes", "begin", "length"])
def test_offsets_and_byte_ranges_must_be_integers(folder: Path, where: str, invalid: Any) -> None:
    value = (invalid, 0) if where in ("offsets", "sizes") else invalid
    (folder / ".metadata").write_bytes(raw_index((2, 2), **{where: value}))
    seal(folder)
    assert_refused(folder, "impossible" if where in ("offsets", "sizes") else "beyond the end")


def test_two_chunks_cannot_share_bytes_of_a_file(folder: Path) -> None:
    """Otherwise an index could have a small file read many times."""
    write_index(folder, {"model.a": (torch.Size([4]), [([0], [2]), ([2], [2])])})
    seal(folder)
    assert_refused(folder, "lie on the same bytes of model__0_0.distcp")


def unit_chunks(shape: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(at, (1,) * len(shape)) for at in itertools.product(*map(range, shape))]


def count_lines(work: Any) -> int:
    """Count the lines of Python that ran: a measure of work that does not depend on other processes."""
    lines = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.parametrize("shape", [(1, None), (None, 1), (None,), (2, None)], ids=str)
def test_the_work_is_proportional_to_the_number_of_chunks(shape: tuple[int | None, ...]) -> None:
    """Twice the chunks take twice the work; n log n would be 2.2 times, and comparing all pairs four times."""
    work = [count_lines(lambda n=n: cover_problem(*at(shape, n))) for n in (500, 1000)]
    assert work[1] / work[0] < 2.5, work


def at(shape: tuple[int | None, ...], count: int) -> tuple[tuple[int, ...], list[Any]]:
    full = tuple(count if length is None else length for length in shape)
    return full, unit_chunks(full)


@pytest.mark.slow  # noticed by the time it takes only
def test_many_chunks_and_many_tensors_are_read_fast(folder: Path) -> None:
    """6,000 chunks of a tensor once took 20 s and 200,000 empty tensors 19 s; now each takes a second or two."""
    chunks = [([0, column], [1, 1]) for column in range(6000)]
    entry = TensorStorageMetadata(
        TensorProperties(torch.float32),
        torch.Size([1, 6000]),
        [ChunkStorageMetadata(torch.Size(begin), torch.Size(extent)) for begin, extent in chunks],
    )
    empty = TensorStorageMetadata(
        TensorProperties(torch.float32),
        torch.Size([0]),
        [ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))],
    )
    names = [f"model.{number}" for number in range(20_000)]
    storage = {MetadataIndex("model.a", begin): _StorageInfo("data", 4 * begin[1], 4) for begin, _ in chunks}
    storage |= {MetadataIndex(name, [0]): _StorageInfo("data", 24_000, 0) for name in names}
    index = Metadata({"model.a": entry} | dict.fromkeys(names, empty), storage_data=storage)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    (folder / "data").write_bytes(bytes(24_000))
    seal(folder)
    assert verify_checkpoint(folder) == []
    assert len(open_checkpoint(folder).tensors) == 20_001


def test_a_list_shared_by_many_tensors_is_refused_early(folder: Path) -> None:
    """A list that is stored once and referenced 100,000 times must not be processed for each reference."""
    chunks = [ChunkStorageMetadata(torch.Size([n]), torch.Size([1])) for n in range(1000)]
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([1000]), chunks)
    entries = {f"model.{number}": entry for number in range(1000)}
    storage = {MetadataIndex("model.0", [n]): _StorageInfo("model__0_0.distcp", n, 1) for n in range(1000)}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=storage)))
    seal(folder)
    assert_refused(folder, "more chunks of tensors than positions")


def test_a_large_memo_index_allocates_nothing() -> None:
    """For LONG_BINPUT 2^31-1, the unpickler in C allocates 4 G entries, 32 GiB."""
    assert read_pickle(b"\x80\x02Nr" + struct.pack("<I", 2**31 - 1) + b".", lambda _: False) is None


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b".",  # a string of 4 EiB
        b"\x80\x02" + b"]" * 100_000 + b".",
        b"\x80\x02]q\x00h\x00a.",  # a list that contains itself
        b"\x80\x02(((((.",
        b"\x80\x02\x85.",
        b"\x80\x02e.",
        b"\x80\x02K\x01K\x02b.",
        b"\x80\x02h\x05.",
        b"\x80\x09.",
        b"\x80\x02}]K\x01s.",
        b"I1\n.",
        b"\x80\x02" + b"N" * 1000,
    ],
)
def test_unsupported_opcodes_are_refused(folder: Path, data: bytes) -> None:
    (folder / ".metadata").write_bytes(data)
    seal(folder)
    assert_refused(folder, ".metadata")


@settings(max_examples=30)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**31), 2**40) | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    ),
    protocol=st.integers(2, 5),
)
def test_plain_values_are_read_as_pickle_does(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), lambda _: False) == value


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(CheckpointError, ValueError):
        read_pickle(b"\x80\x04" + data, lambda name: name.startswith("torch"))


def boxes_of(cells: int, rng: random.Random, shape: tuple[int, ...]) -> Iterator[Any]:
    """Split a shape into boxes: cut a box in two, a number of times."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(cells):
        offsets, sizes = boxes.pop(rng.randrange(len(boxes)))
        axis = rng.randrange(len(shape))
        if sizes[axis] < 2:
            boxes.append((offsets, sizes))
            continue
        cut = rng.randrange(1, sizes[axis])
        low, high = list(sizes), list(sizes)
        low[axis], high[axis] = cut, sizes[axis] - cut
        behind = list(offsets)
        behind[axis] += cut
        boxes += [(offsets, tuple(low)), (tuple(behind), tuple(high))]
    return iter(boxes)


def covers_each_element_once(shape: tuple[int, ...], boxes: list[Any]) -> bool:
    """Count the boxes of every element; True if each is in exactly one."""
    count = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in boxes:
        count[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))] += 1
    return bool((count == 1).all())


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), axes=st.integers(1, 3), cells=st.integers(0, 12), change=st.booleans())
def test_cover_problem_agrees_with_counting_every_element(seed: int, axes: int, cells: int, change: bool) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 7) for _ in range(axes))
    boxes = list(boxes_of(cells, rng, shape))
    if change:  # another box of the same size: the number of elements stays correct
        place = rng.randrange(len(boxes))
        sizes = boxes[place][1]
        boxes[place] = (tuple(rng.randrange(full - size + 1) for full, size in zip(shape, sizes, strict=True)), sizes)
    assert (not cover_problem(shape, boxes)) == covers_each_element_once(shape, boxes)
