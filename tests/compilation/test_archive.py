"""Archives of compiled code: complete and for this machine, or refused without a trace in the cache."""

import errno
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlat.compilation import check_archive_path, compiled_files, pack, unpack
from hlat.runtime.errors import LaunchError, StorageError

HERE = {"torch": "2.13.0", "device": "a processor"}
FILES = {"inductor/ab/kernel.so": b"code", "inductor/fxgraph/xy": b"graph", "inductor/copy": b"code"}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of three files, two of them equal, and no lock."""
    made = tmp_path / "made"
    for name, content in {**FILES, "inductor/locks/a.lock": b""}.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(content)
    pack(tmp_path / "code.tar", "cpu", HERE, 1, compiled_files(made))
    return tmp_path / "code.tar"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rewritten(archive: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]) -> Path:
    """The archive with other members."""
    with tarfile.open(archive) as given:
        members = [(member, given.extractfile(member).read()) for member in given]  # type: ignore[union-attr]
    change(members)
    with tarfile.open(archive, "w") as changed:
        for member, content in members:
            member.size = len(content) if member.isreg() else 0
            changed.addfile(member, io.BytesIO(content))
    return archive


def with_manifest(archive: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    def edit(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        head = json.loads(members[0][1])
        change(head)
        members[0] = (members[0][0], json.dumps(head).encode())

    return rewritten(archive, edit)


def test_what_is_packed_is_unpacked_beside_what_is_there(archive: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "inductor").mkdir(parents=True)
    (cache / "inductor" / "other").write_bytes(b"of another run")
    found = unpack(archive, "cpu", HERE, str(cache))
    assert contents(cache) == {**FILES, "inductor/other": b"of another run"}
    assert (found.files, found.size, found.world) == (3, 13, 1)
    with tarfile.open(archive) as stored:
        assert len(stored.getnames()) == 1 + 2, "equal files are stored once"
    first = archive.read_bytes()
    pack(archive, "cpu", HERE, 1, compiled_files(tmp_path / "made"))
    assert archive.read_bytes() == first, "equal caches give equal archives"


@pytest.mark.parametrize(
    ("device", "versions", "says"),
    [
        ("cpu", {**HERE, "torch": "2.12.1"}, r"torch: 2\.13\.0 in the archive, 2\.12\.1 here"),
        ("cpu", {**HERE, "device": "another"}, r"device: a processor in the archive, another here"),
        ("cpu", {**HERE, "Triton": "3.7"}, r"Triton: none in the archive, 3\.7 here"),
        ("neuron", HERE, r"device type: cpu in the archive, neuron here"),
    ],
)
def test_another_device_or_version_is_refused(
    archive: Path, tmp_path: Path, device: str, versions: dict[str, str], says: str
) -> None:
    with pytest.raises(LaunchError, match=says) as error:
        unpack(archive, device, versions, str(tmp_path / "cache"))
    assert "Nothing was unpacked" in str(error.value) and "hlat compile RECIPE --to" in str(error.value)
    assert not contents(tmp_path / "cache")


def _damage(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members[1] = (members[1][0], b"x" * len(members[1][1]))


def _link(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members[1][0].type, members[1][0].linkname = tarfile.SYMTYPE, "/etc/passwd"


def _renamed(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members[1][0].name = "../outside"


def _added(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members.append((tarfile.TarInfo("content/more\x1b[31m"), b"code"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_damage, "is damaged"),
        (_link, "not what its manifest lists"),
        (_renamed, "not what its manifest lists"),
        (_added, "not what its manifest lists"),
        (lambda members: members.pop(), "missing: 1 of 2 files"),
        (lambda members: members.pop(0), "no archive of compiled code"),
    ],
)
def test_a_damaged_archive_is_refused(archive: Path, tmp_path: Path, change: Any, says: str) -> None:
    with pytest.raises(LaunchError, match=says) as error:
        unpack(rewritten(archive, change), "cpu", HERE, str(tmp_path / "cache"))
    assert "\x1b" not in str(error.value)
    assert not contents(tmp_path / "cache") and not (tmp_path / "outside").exists()


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("../outside", "manifest is damaged"),
        ("/etc/outside", "manifest is damaged"),
        ("inductor/../../outside", "manifest is damaged"),
        ("inductor", "manifest is damaged"),
        ("other/file", "no compiler of cpu devices"),
        ("rank-0/inductor/file", "no compiler of cpu devices"),
    ],
)
def test_a_path_outside_of_the_cache_is_refused(archive: Path, tmp_path: Path, path: str, says: str) -> None:
    sha256 = hashlib.sha256(b"code").hexdigest()
    changed = with_manifest(archive, lambda head: head["files"].update({path: [sha256, 4]}))
    with pytest.raises(LaunchError, match=says):
        unpack(changed, "cpu", HERE, str(tmp_path / "cache"))
    assert not contents(tmp_path / "cache") and not (tmp_path / "outside").exists()


def test_other_files_and_formats_are_refused(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(LaunchError, match="no complete archive"):
        unpack(tmp_path / "text", "cpu", HERE, str(tmp_path / "cache"))
    with pytest.raises(StorageError, match=r"absent: No such file"):
        unpack(tmp_path / "absent", "cpu", HERE, str(tmp_path / "cache"))
    cut = tmp_path / "cut"
    cut.write_bytes(archive.read_bytes()[:700])
    with pytest.raises(LaunchError, match="no complete archive"):
        unpack(cut, "cpu", HERE, str(tmp_path / "cache"))
    with pytest.raises(LaunchError, match="format 9 of another version"):
        unpack(with_manifest(archive, lambda head: head.update(format=9)), "cpu", HERE, str(tmp_path / "cache"))


def test_an_archive_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    check_archive_path(tmp_path / "new.tar")
    with pytest.raises(StorageError, match="this is a folder"):
        check_archive_path(tmp_path)
    with pytest.raises(StorageError, match="does not exist"):
        check_archive_path(tmp_path / "no" / "new.tar")


@pytest.mark.parametrize("missing", [True, False])
def test_an_archive_has_its_name_only_when_it_is_complete(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    before, files = archive.read_bytes(), compiled_files(tmp_path / "made")
    if missing:
        files["inductor/gone"] = tmp_path / "gone"
    else:
        monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(StorageError, match=r"code\.tar: the archive cannot be written"):
        pack(archive, "cpu", HERE, 1, files)
    assert archive.read_bytes() == before
    assert not list(tmp_path.glob(".code.tar*"))


def full_disk(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
