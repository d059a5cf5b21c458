"""Hostile checkpoint indexes: a pickled index is refused with a message, or the tensors are correct.

.metadata of a checkpoint --bytes, numbers or objects changed; resealed--> verify, tensors, load
"""

import io
import json
import os
import pickle
import pickletools
import random
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from hlat.checkpoint.format.index import INDEX_NAME, parse_index
from hlat.checkpoint.format.tensor_files import replicated_chunks
from hlat.checkpoint.protocol.reader import open_checkpoint, read_manifest, verify_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.runtime.errors import CheckpointError

SLOW = int(os.environ.get("HLAT_FUZZ_INDEXES", "20000"))

STATE = {
    "model.weight": torch.arange(35.0).reshape(5, 7),
    "model.empty": torch.empty(0, 3),
    "optimizer.step": torch.tensor(3),
    "rng.torch": torch.arange(16, dtype=torch.uint8),
}
ODD_NUMBERS = [0, 1, 2, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    return CheckpointStore(folder / "checkpoints", 1).save(1, replicated_chunks(STATE), {"step": 1})


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 4])):
        offset = rng.randrange(len(changed))
        kind = rng.randrange(4)
        if kind == 0:
            changed[offset] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[offset] = rng.randrange(256)
        elif kind == 2:
            del changed[offset : offset + rng.choice([1, 4, 40])]
        else:
            changed[offset:offset] = rng.randbytes(rng.choice([1, 4]))
        if not changed:
            return b"."
    return bytes(changed)


def change_numbers(data: bytes, rng: random.Random) -> bytes:
    """Replace an instruction for a number, a memo entry or a name; the rest remains a readable pickle."""
    found = [
        (opcode, position)
        for opcode, _, position in pickletools.genops(data)
        if opcode.name in ("BININT1", "BININT", "BINGET", "NEWTRUE", "NEWFALSE", "NONE", "EMPTY_TUPLE", "MEMOIZE")
    ]
    opcode, offset = rng.choice(found)
    length = {"BININT1": 2, "BINGET": 2, "BININT": 5}.get(opcode.name, 1)
    odd: list[bytes] = [
        b"N", b"\x88", b"\x89", b")", b"]", b"}", b"K" + rng.randbytes(1), b"h" + rng.randbytes(1),
        b"J" + rng.choice(ODD_NUMBERS).to_bytes(4, "little"), b"G" + rng.randbytes(8), b"\x8c\x01a",
        b"\x8a\x09" + rng.randbytes(9), b"r" + rng.choice(ODD_NUMBERS).to_bytes(4, "little"), b"ctorch\nfloat64\n",
        b"cos\nsystem\n",
    ]  # fmt: skip
    return data[:offset] + rng.choice(odd) + data[offset + length :]


def change_objects(data: bytes, rng: random.Random) -> bytes:
    """Replace values in the objects of an index, as an attacker with torch would do."""
    index: Metadata = pickle.loads(data)
    name = rng.choice(sorted(index.state_dict_metadata))
    entry = index.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    odd: list[Any] = [None, -1, True, 1.5, "x", b"x", [], {}, 2**70, torch.Size([1, 2]), torch.float64, entry, index]
    value = rng.choice(odd)
    kind = rng.randrange(6)
    if kind == 0:
        entry.size = rng.choice([value, torch.Size([2**40] * 3), torch.Size([rng.randrange(9)] * 2)])
    elif kind == 1:
        entry.chunks = rng.choice([value, [value], [ChunkStorageMetadata(torch.Size([0]), torch.Size([5]))], [entry]])
    elif kind == 2:
        entry.properties.dtype = value
    elif kind == 3:
        entry_location = rng.choice(list(index.storage_data.values()))
        setattr(entry_location, rng.choice(["relative_path", "offset", "length", "transform_descriptors"]), value)
    elif kind == 4:
        setattr(index, rng.choice(["state_dict_metadata", "storage_data", "planner_data", "version"]), value)
    else:
        index.state_dict_metadata[rng.choice(["", "a" * 5000, "\x1b[31m", "model.new"])] = rng.choice([entry, value])
    stream = io.BytesIO()
    pickle.Pickler(stream, rng.randrange(2, 6)).dump(index)
    return stream.getvalue()


CHANGES = [change_bytes, change_numbers, change_objects]


def try_many(saved: Path, count: int, seed: int) -> list[str]:
    original = (saved / INDEX_NAME).read_bytes()
    sizes = read_manifest(saved).file_bytes
    broken, refused = [], 0
    for number in range(count):
        rng = random.Random(seed + number)
        data = rng.choice(CHANGES)(original, rng)
        try:
            index = parse_index(data, sizes)
        except CheckpointError as error:
            refused += 1
            if len(str(error)) > 3000 or not str(error).isprintable():
                broken.append(f"seed {seed + number}: message {str(error)[:300]!r}")
            continue
        except Exception as error:
            broken.append(f"seed {seed + number}: {type(error).__name__}: {error}")
            continue
        for name, form in index.items():
            tensor = torch.empty(form.shape, dtype=form.dtype, device="meta")
            stored = sum(chunk.length for chunk in form.chunks)
            if tensor.nbytes > stored or stored > sum(sizes.values()):
                broken.append(f"seed {seed + number}: {name} of {tensor.nbytes} bytes, {stored} in the files")
    assert refused > count // 4, "many changes are detected"
    return broken


def test_a_few_hostile_indexes(saved: Path) -> None:
    assert try_many(saved, 600, seed=0) == []


@pytest.mark.slow
def test_many_hostile_indexes(saved: Path) -> None:
    assert try_many(saved, SLOW, seed=10_000) == []


@pytest.mark.parametrize("seed", range(30))
def test_a_resealed_index_gives_correct_tensors_or_a_message(saved: Path, tmp_path: Path, seed: int) -> None:
    """A checkpoint that passes verification is loaded with tensors of its files, or refused with a message."""
    rng = random.Random(seed)
    folder = tmp_path / "checkpoints" / saved.name
    shutil.copytree(saved, folder)
    data = rng.choice(CHANGES)((saved / INDEX_NAME).read_bytes(), rng)
    (folder / INDEX_NAME).write_bytes(data)
    _seal(folder)
    if verify_checkpoint(folder):
        return
    checkpoint = open_checkpoint(folder)
    try:
        loaded = checkpoint.load("")
    except CheckpointError:
        return
    stored_bytes = {bytes(_raw(tensor)) for tensor in STATE.values()}
    assert all(bytes(_raw(tensor)) in stored_bytes for tensor in loaded.values()), (
        "bytes that are not in the checkpoint"
    )


def _raw(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _seal(folder: Path) -> None:
    """Update the checksums."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    data = (folder / INDEX_NAME).read_bytes()
    manifest["files"][INDEX_NAME] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "COMMITTED").write_text(sha256((folder / "manifest.json").read_bytes()).hexdigest())
