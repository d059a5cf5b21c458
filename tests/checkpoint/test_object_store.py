"""The upload of a damaged file is aborted: no object appears, and no incomplete upload is left."""

import hashlib
from pathlib import Path

import pytest

from hlat.checkpoint import object_store as objects
from hlat.checkpoint.format.filesystem import FileRecord
from hlat.checkpoint.object_store import ObjectStoreClient
from hlat.runtime.errors import CheckpointError


class _Upload:
    """Object being written, like fsspec's: ``close`` completes it, ``discard`` removes its parts."""

    def __init__(self) -> None:
        self.closed, self.ends = False, list[str]()

    def write(self, piece: bytes) -> None:
        assert not self.ends

    def close(self) -> None:
        self.ends.append("completed")
        self.closed = True

    def discard(self) -> None:
        self.ends.append("discarded")


class _Store:
    """Store that records its uploads and no objects."""

    def __init__(self) -> None:
        self.uploads: list[_Upload] = []

    def open(self, path: str, mode: str, block_size: int) -> _Upload:
        self.uploads.append(_Upload())
        return self.uploads[-1]


@pytest.mark.parametrize("damaged", [False, True])
def test_an_upload_is_completed_only_if_the_file_matches_its_checksum(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damaged: bool
) -> None:
    store, file, content = _Store(), tmp_path / "a.distcp", b"weights" * 1000
    monkeypatch.setattr(objects, "open_filesystem", lambda url, wrong: (store, "bucket/run"))
    file.write_bytes(content[:-1] + b"!" if damaged else content)
    record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
    reached = ObjectStoreClient("s3://bucket/run", 0)
    if damaged:
        with pytest.raises(CheckpointError, match=r"a\.distcp: does not match its checksum"):
            reached.upload(file, "a.distcp", record)
    else:
        reached.upload(file, "a.distcp", record)
    [upload] = store.uploads
    assert upload.ends == ["discarded" if damaged else "completed"]
    assert upload.closed, "otherwise the garbage collector would complete it"
