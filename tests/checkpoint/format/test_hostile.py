"""Law 9: a checkpoint made by an attacker, with valid checksums, is refused and runs no code."""

import builtins
import enum
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hlat.checkpoint.protocol.reader import open_checkpoint, resolve, verify_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.runtime.errors import CheckpointError
from tests.support.checkpoint.saved_states import save, state
from tests.support.storages import limited_memory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(CheckpointStore(tmp_path / "checkpoints", 1), 1)


def seal(folder: Path, **extra: dict[str, Any]) -> None:
    """Write a manifest and a marker that match the present files of a folder."""
    names = [p for p in folder.rglob("*") if p.is_file() and p.name not in ("manifest.json", "COMMITTED")]
    files = {p.relative_to(folder).as_posix(): describe(p) for p in names} | extra
    data = json.dumps({"format": 1, "step": 1, "files": files}).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "COMMITTED").write_text(sha256(data).hexdigest())


def describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path.read_bytes()).hexdigest()}


def assert_refused(folder: Path, message: str) -> None:
    """Check that ``verify_checkpoint``, ``resolve``, loading without them, and a store refuse the checkpoint."""
    assert message in "; ".join(verify_checkpoint(folder))
    with pytest.raises(CheckpointError, match="damaged"):
        resolve(folder)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder).load("")
    with pytest.raises(CheckpointError, match="no checkpoint is valid"):
        CheckpointStore(folder.parent, 1).newest()


class Payload:
    """Object that calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def payloads(proof: Path) -> dict[str, Any]:
    return {
        "os.system": Payload(os.system, f"touch {proof}"),
        "eval": Payload(builtins.eval, f"open({str(proof)!r}, 'w')"),
        "exec": Payload(builtins.exec, f"open({str(proof)!r}, 'w')"),
        "getattr": Payload(getattr, os, "system"),
        "torch.load": Payload(torch.load, str(proof)),
        "inside": Metadata({"model.weight": Payload(os.system, f"touch {proof}")}),  # type: ignore[dict-item]
    }


@pytest.mark.parametrize("name", payloads(Path()))
def test_a_pickle_payload_runs_nothing(folder: Path, tmp_path: Path, name: str) -> None:
    proof = tmp_path / "proof"
    data = (
        pickle.dumps(payloads(proof)[name])
        if name != "getattr"
        else b"cposix\nsystem\n(S'touch " + str(proof).encode() + b"'\ntR."
    )
    (folder / ".metadata").write_bytes(data)
    seal(folder)
    assert_refused(folder, "nothing was run")
    assert not proof.exists()


def test_a_plain_unpickler_runs_the_payload(tmp_path: Path) -> None:
    """Check of the test itself."""
    proof = tmp_path / "proof"
    pickle.loads(pickle.dumps(payloads(proof)["os.system"]))
    assert proof.exists()


@pytest.mark.parametrize("name", ["torch.hub", "torch.Tensor", "torch.float32.__reduce__", "torch.serialization.load"])
def test_other_torch_names_than_dtypes_and_sizes_are_refused(folder: Path, name: str) -> None:
    module, _, attribute = name.partition(".")
    if name == "torch.serialization.load":
        module, attribute = "torch.serialization", "load"
    text = [b"\x80\x04", b"\x8c", bytes([len(module)]), module.encode()]
    text += [b"\x8c", bytes([len(attribute)]), attribute.encode(), b"\x93."]
    (folder / ".metadata").write_bytes(b"".join(text))
    seal(folder)
    assert_refused(folder, "nothing was run")


@pytest.mark.parametrize("owner", [Metadata, torch.Size, torch.float32])
def test_getattr_is_resolved_for_memory_formats_only(folder: Path, owner: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(getattr, owner, "__class__")))
    seal(folder)
    assert_refused(folder, "nothing was run")


class _EnumsByGetattr(pickle.Pickler):
    """Pickler that writes enum members as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_an_index_written_by_python_3_11_2_is_read(folder: Path) -> None:
    path = folder / ".metadata"
    before = open_checkpoint(resolve(folder)).load("")
    stream = io.BytesIO()
    _EnumsByGetattr(stream).dump(pickle.loads(path.read_bytes()))
    assert b"getattr" in stream.getvalue()
    path.write_bytes(stream.getvalue())
    seal(folder)
    after = open_checkpoint(resolve(folder)).load("")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_payload_in_a_tensor_file_runs_nothing(folder: Path, tmp_path: Path) -> None:
    """The bytes of a tensor contain a pickle too, and a valid index points to it."""
    proof = tmp_path / "proof"
    stream = io.BytesIO()
    torch.save(Payload(os.system, f"touch {proof}"), stream)
    (folder / "model__0_0.distcp").write_bytes(stream.getvalue())
    write_index(folder, {"model.a": (torch.Size([2]), [([0], [2])])}, length=len(stream.getvalue()))
    seal(folder)
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(resolve(folder)).load("")
    assert not proof.exists()


def write_index(
    folder: Path,
    tensors: dict[str, tuple[torch.Size, list[tuple[list[int], list[int]]]]],
    *,
    file: str = "model__0_0.distcp",
    offset: int = 0,
    length: int = 64,
) -> None:
    entries, storage = {}, {}
    for name, (size, boxes) in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(begin), torch.Size(extent)) for begin, extent in boxes]
        entries[name] = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
        for begin, _ in boxes:
            storage[MetadataIndex(name, begin)] = _StorageInfo(file, offset, length)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=storage)))


HUGE = 2**40


@pytest.mark.parametrize(
    ("size", "boxes", "position", "message"),
    [
        ([HUGE, HUGE], [([0, 0], [HUGE, HUGE])], {}, "its size in bytes exceeds"),
        ([HUGE], [([0], [HUGE])], {}, "needs"),
        ([HUGE], [([0], [2])], {}, "its chunks have 2"),
        ([HUGE], [], {}, "its chunks have 0"),
        ([4], [([0], [8])], {}, "outside its shape"),
        ([4], [([2], [4])], {}, "outside its shape"),
        ([4, 4], [([0], [16])], {}, "the number of dimensions of a chunk differs"),
        ([4], [([0], [3]), ([2], [1])], {}, "two of its chunks overlap"),
        ([3], [([0], [1]), ([0], [1]), ([2], [1])], {}, "more chunks of tensors than positions"),
        ([4, 4], [([0, 0], [4, 2]), ([2, 1], [2, 2]), ([0, 2], [2, 2])], {}, "two of its chunks overlap"),
        ([17], [([0], [17])], {"length": 64}, "needs 68 bytes"),
        ([4], [([0], [4])], {"offset": 1 << 30}, "beyond the end"),
        ([4], [([0], [4])], {"length": 1 << 40}, "beyond the end"),
        ([4], [([0], [4])], {"offset": -64}, "beyond the end"),
        ([4], [([0], [4])], {"file": "../../secret"}, "not a file of this checkpoint"),
        ([4], [([0], [4])], {"file": "/etc/passwd"}, "not a file of this checkpoint"),
    ],
)
def test_an_impossible_index_is_refused_before_any_allocation(
    folder: Path, size: list[int], boxes: list[tuple[list[int], list[int]]], position: dict[str, Any], message: str
) -> None:
    (folder.parent / "secret").write_bytes(bytes(1000))
    write_index(folder, {"model.a": (torch.Size(size), boxes)}, **position)
    seal(folder)
    with limited_memory(1 << 30):
        assert_refused(folder, message)


def test_entries_that_are_not_tensors_are_refused(folder: Path) -> None:
    """DCP reads such entries with an unrestricted unpickler."""
    index = Metadata({"model.a": BytesStorageMetadata()}, storage_data={})
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    seal(folder)
    assert_refused(folder, "nothing was run")


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"not a pickle", pickle.dumps({"a": 1}), pickle.dumps(None)])
def test_a_file_that_is_not_an_index_is_refused(folder: Path, data: bytes) -> None:
    (folder / ".metadata").write_bytes(data)
    seal(folder)
    assert_refused(folder, ".metadata")


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../../secret", "..", "", "a//b", "./a", "C:a", "a\\..\\b"]
)
def test_a_manifest_cannot_name_files_outside_the_checkpoint(folder: Path, name: str) -> None:
    (folder.parent / "secret").write_text("secret")
    seal(folder, **{name: describe(folder.parent / "secret")})
    assert_refused(folder, "not a plain path inside the checkpoint")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("files"),
        lambda m: m.update(format=0),
        lambda m: m.update(format="1"),
        lambda m: m.update(format=True),
        lambda m: m.update(step=-1),
        lambda m: m.update(step="1"),
        lambda m: m.update(files=[]),
        lambda m: m["files"].pop(".metadata"),
        lambda m: m["files"].pop("meta.json"),
        lambda m: m["files"]["meta.json"].update(bytes=-1),
        lambda m: m["files"]["meta.json"].update(bytes=1e300),
        lambda m: m["files"]["meta.json"].update(sha256="zz"),
    ],
)
def test_a_manifest_with_invalid_fields_is_refused(folder: Path, change: Callable[[Any], None]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    data = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "COMMITTED").write_text(sha256(data).hexdigest())
    assert_refused(folder, "manifest.json")


def test_a_deeply_nested_manifest_is_refused(folder: Path) -> None:
    data = b'{"format":' + b"[" * 100_000
    (folder / "manifest.json").write_bytes(data)
    (folder / "COMMITTED").write_text(sha256(data).hexdigest())
    assert "not a valid manifest" in verify_checkpoint(folder)[0]


def test_files_that_the_manifest_does_not_list_are_not_read(folder: Path, tmp_path: Path) -> None:
    """An additional file changes nothing."""
    shutil.copyfile(folder / "meta.json", folder / "extra.json")
    assert verify_checkpoint(folder) == []
    assert open_checkpoint(resolve(folder)).load("").keys() == state(1).keys()
