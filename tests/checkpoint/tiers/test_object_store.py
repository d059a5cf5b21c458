"""An upload that is found to be of a damaged file is given up: nothing appears, and nothing that was sent stays."""

import hashlib
from pathlib import Path

import pytest

from hlat.checkpoint.format import FileRecord
from hlat.checkpoint.tiers import ObjectStoreClient
from hlat.checkpoint.tiers import object_store as objects
from hlat.runtime import CheckpointError


class _Upload:
    """An object that is being written, as fsspec has it: closing completes it, discarding takes its parts back."""

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
    """Keeps no objects, but what became of the writing of them."""

    def __init__(self) -> None:
        self.uploads: list[_Upload] = []

    def open(self, path: str, mode: str, block_size: int) -> _Upload:
        self.uploads.append(_Upload())
        return self.uploads[-1]


@pytest.mark.parametrize("damaged", [False, True])
def test_only_what_matches_its_checksum_is_completed(
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
    assert upload.closed, "or it would be completed when it is collected"
