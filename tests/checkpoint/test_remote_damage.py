"""Checkpoints of a real S3-protocol server that are damaged, cannot be downloaded, or are removed as too old."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.inventory import verify_remote
from hlat.checkpoint.object_store import ObjectStoreClient
from hlat.runtime.errors import StorageError
from tests.checkpoint.format.test_hostile import seal
from tests.support.checkpoint.remote_runs import Run, objects_of
from tests.support.checkpoint.saved_states import assert_is_step, save
from tests.support.object_store import ObjectStore


def flip(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


HARMS: dict[str, Callable[[bytes], bytes | None]] = {
    "flip": flip,
    "truncate": lambda data: data[:-1],
    "append": lambda data: data + b"x",
    "delete": lambda data: None,
}


@pytest.mark.parametrize(("victim", "content"), [("meta.json", b'{"step": "many"}'), (".metadata", b"no pickle")])
def test_files_edited_in_the_store_with_valid_checksums_are_reported(
    run: Run, s3: ObjectStore, victim: str, content: bytes
) -> None:
    """Metadata and index are checked, even if all checksums match."""
    [folder] = run.save_and_upload(1)
    assert verify_remote(ObjectStoreClient(run.url), 1) == []
    (folder / victim).write_bytes(content)
    seal(folder)
    prefix = f"{run.url.removeprefix('s3://corpus/')}/step-00000001"
    for name in (victim, "manifest.json", "COMMITTED"):
        s3.replace(f"{prefix}/{name}", (folder / name).read_bytes())
    [problem] = verify_remote(ObjectStoreClient(run.url), 1)
    assert ("step: input should be a valid integer" if victim == "meta.json" else "not a readable index") in problem


@pytest.mark.parametrize(
    ("victim", "harm"),
    [
        ("model__0_0.distcp", "flip"),
        # tests/checkpoint/protocol/test_damage.py finds all of these on a disk in the default suite
        *(pytest.param("model__0_0.distcp", harm, marks=pytest.mark.slow) for harm in ("truncate", "append", "delete")),
        pytest.param(".metadata", "flip", marks=pytest.mark.slow),
        ("meta.json", "delete"),
        ("manifest.json", "truncate"),
    ],
)
def test_damage_in_the_store_is_reported_and_the_previous_checkpoint_is_used(
    run: Run, s3: ObjectStore, victim: str, harm: str
) -> None:
    [_, folder] = run.save_and_upload(1, 2)
    key = f"{run.url.removeprefix('s3://corpus/')}/step-00000002/{victim}"
    changed = HARMS[harm]((folder / victim).read_bytes())
    if changed is None:
        ObjectStoreClient(run.url).remove(f"step-00000002/{victim}")
    else:
        s3.replace(key, changed)
    [problem] = verify_remote(ObjectStoreClient(run.url), 2)
    assert victim in problem
    other = run.on_new_machine()
    store = other.store()
    assert other.remote().fetch_newest(store.root, None) == 1
    assert_is_step(store.newest(), 1)
    [(path, [problem])] = other.damaged
    assert path == f"{run.url}/step-00000002" and victim in problem
    assert sorted(path.name for path in store.root.iterdir()) == ["step-00000001"], "no file of it is left"
    assert "COMMITTED.bad" in ObjectStoreClient(run.url).list_names("step-00000002")
    assert other.remote().fetch_newest(store.root, 1) is None, "the damaged checkpoint is skipped from now on"
    other.remote().upload(save(store, 2))
    assert run.fetch_on_new_machine() == 2, "the run can save that step again"


def test_a_failed_download_leaves_nothing(run: Run, tmp_path: Path) -> None:
    class FullDisk(Disk):
        def free_bytes(self, path: Path) -> int:
            return 1000

    run.save_and_upload(1)
    other = run.on_new_machine()
    root = other.store().root
    with pytest.raises(StorageError, match=rf"cannot download {run.url}/step-00000001 in .* are free"):
        other.remote(disk=FullDisk()).fetch_newest(root, None)
    assert list(root.iterdir()) == []


def test_pruning_removes_the_marker_first(run: Run, s3: ObjectStore) -> None:
    run.save_and_upload(1, 2, 3, 4)
    requests = len(s3.requests())
    assert run.remote().prune() == [1]
    gone = [line for line in s3.requests()[requests:] if line.startswith(("DELETE", "POST"))]
    assert len(gone) >= 2
    assert ObjectStoreClient(run.url).list_names() == ["run.json", "step-00000002", "step-00000003", "step-00000004"]


def test_the_last_valid_checkpoint_is_never_removed(run: Run, s3: ObjectStore, tmp_path: Path) -> None:
    run.keep_last = 1
    run.save_and_upload(1, 2)
    s3.replace(f"{run.url.removeprefix('s3://corpus/')}/step-00000002/model__0_0.distcp", b"nothing")
    assert run.remote().prune() == [], "this process has not verified step 2, and now finds it damaged"
    assert run.fetch_on_new_machine() == 1


def test_no_credentials_are_stored(run: Run, s3: ObjectStore) -> None:
    run.save_and_upload(1)
    secret = s3.environment["AWS_SECRET_ACCESS_KEY"]
    for path in [*run.folder.rglob("*"), *objects_of(s3, run.url).rglob("*")]:
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    assert secret not in json.dumps(ObjectStoreClient(run.url).list_names())
