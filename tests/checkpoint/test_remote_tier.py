"""Checkpoints in a real S3-protocol server: complete and verified, or absent, whatever fails on either side."""

import hashlib
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from hlat.checkpoint import object_store as objects
from hlat.checkpoint.format.filesystem import FileRecord
from hlat.checkpoint.inventory import verify_remote
from hlat.checkpoint.object_store import ObjectStoreClient
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.checkpoint.run_id import RunId
from hlat.checkpoint.tiers import Tiers
from hlat.config.sections.operation import CheckpointConfig
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import CheckpointError, StorageError
from tests.checkpoint.test_killed import child
from tests.support.checkpoint.machines import chunks_of, meta_of
from tests.support.checkpoint.remote_runs import Run, no_pause, objects_of
from tests.support.checkpoint.saved_states import assert_equal, assert_is_step, save, state
from tests.support.checkpoint.thread_ranks import results_of, run_on_ranks
from tests.support.launch.launching import wait_until
from tests.support.object_store import ObjectStore


def test_a_checkpoint_is_uploaded_and_downloaded_unchanged(run: Run, s3: ObjectStore) -> None:
    [first, second] = run.save_and_upload(4, 5)
    there = objects_of(s3, run.url) / second.name
    assert {path.name: path.read_bytes() for path in there.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }
    other = run.on_new_machine()
    store = other.store()
    assert other.remote().fetch_newest(store.root, 5) is None
    assert other.remote().fetch_newest(store.root, 4) == 5
    assert_is_step(store.newest(), 5)
    requests = len(s3.requests())
    run.remote().upload(second)
    assert not [line for line in s3.requests()[requests:] if line.startswith("PUT")], "the store already has it"
    assert run.remote().missing(run.root) == []
    assert first.name in [path.name for path in objects_of(s3, run.url).iterdir()]


def test_each_rank_uploads_the_files_it_wrote(run: Run, s3: ObjectStore) -> None:
    class RecordingClient(ObjectStoreClient):
        def upload(self, source: Path, *rest: Any) -> None:
            sent.append((self.rank, source.name))
            super().upload(source, *rest)

        rank = -1

    sent: list[tuple[int, str]] = []

    def work(ranks: HostGroup) -> str:
        store = run.store(ranks)
        folder = store.save(7, chunks_of(7, ranks.rank, ranks.world), meta_of(7))
        client = RecordingClient(run.url, 0, no_pause)
        client.rank = ranks.rank
        return run.remote(client, ranks).upload(folder)

    assert set(results_of(run_on_ranks(3, work))) == {f"{run.url}/step-00000007"}
    tensors = [(rank, name) for rank, name in sent if name.endswith(".distcp")]
    assert {rank for rank, _ in tensors} == {0, 1, 2}
    assert all(f"__{rank}_" in name for rank, name in tensors)
    assert {rank for rank, name in sent if not name.endswith(".distcp")} == {0}

    def fetch(ranks: HostGroup) -> int | None:
        return other.remote(ranks=ranks).fetch_newest(other.store(ranks).root, None)

    other = run.on_new_machine()
    assert results_of(run_on_ranks(2, fetch)) == [7, 7]
    newest = other.store().newest()
    assert newest is not None
    assert newest.meta == meta_of(7)
    assert_equal(newest.load(""), state(7))


# --- crashes and outages -------------------------------------------------------------------------------------------


class ClientKilled(BaseException):
    """Crash of the client. Not an Exception, so that no code under test handles it."""


class CountingClient(ObjectStoreClient):
    """Client that crashes before request number ``at``, counting the requests that change something."""

    count = 0
    at = 1 << 30

    def change(self) -> None:
        self.count += 1
        if self.count >= self.at:
            raise ClientKilled

    def put(self, name: str, data: bytes) -> None:
        self.change()
        super().put(name, data)

    def create(self, name: str, data: bytes) -> bytes:
        self.change()
        return super().create(name, data)

    def remove(self, name: str) -> None:
        self.change()
        super().remove(name)

    def upload(self, source: Path, *rest: Any) -> None:
        self.change()
        super().upload(source, *rest)


def upload_and_prune(run: Run, client: ObjectStoreClient) -> None:
    remote = run.remote(client)
    remote.upload(run.root / "step-00000003")
    remote.prune()


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_crash_before_any_request_leaves_valid_checkpoints_only(
    tmp_path: Path, url: str, s3: ObjectStore, every: int
) -> None:
    """The last request is the removal that ends the pruning: before it, step 3 is there."""

    def prepare_run(name: str) -> Run:
        made = Run(tmp_path / name / "run", f"{url}/{name}", keep_last=1)
        made.save_and_upload(2)
        save(made.store(), 3)
        return made

    count = CountingClient(f"{url}/count", 0, no_pause)
    upload_and_prune(prepare_run("count"), count)
    assert count.count > 8
    found = []
    for at in range(count.count, 0, -every):
        run = prepare_run(f"stop-{at}")
        counted = CountingClient(run.url, 0, no_pause)
        counted.at = at
        with pytest.raises(ClientKilled):
            upload_and_prune(run, counted)
        step = run.fetch_on_new_machine()
        assert step in (2, 3)
        found.append(step)
        upload_and_prune(run, ObjectStoreClient(run.url, 0, no_pause))
        assert run.fetch_on_new_machine() == 3
        assert ObjectStoreClient(run.url).list_names() == ["run.json", "step-00000003"]
    assert sorted(found, reverse=True) == found and set(found) == {2, 3}


def upload_once(pipe: Connection, run: Run, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    pipe.send("begun")
    run.remote().upload(run.root / "step-00000002")
    pipe.send("done")


def wait_for_request(s3: ObjectStore, part: str) -> None:
    deadline = time.monotonic() + 600
    while not any(part in line for line in s3.requests()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_upload_killed_halfway_leaves_no_checkpoint(run: Run, s3: ObjectStore) -> None:
    run.save_and_upload(1)
    save(run.store(), 2)
    target = f"{run.url.removeprefix('s3:/')}/step-00000002/optimizer"
    s3.misbehave({"method": "PUT", "path": target, "wait": 100_000})
    folder = objects_of(s3, run.url) / "step-00000002"
    with child(upload_once, run, s3.environment) as (process, _):
        wait_for_request(s3, f"PUT {target}")
        wait_until(lambda: folder.is_dir() and any(folder.iterdir()))  # another file, which is uploaded beside it
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    s3.misbehave()
    there = [path.name for path in folder.iterdir()]
    assert there and "COMMITTED" not in there, "some of its files were uploaded"
    assert run.fetch_on_new_machine() == 1
    assert run.remote().missing(run.root) == [run.root / "step-00000002"]
    run.remote().upload(run.root / "step-00000002")
    assert run.fetch_on_new_machine() == 2


def test_an_upload_survives_a_restart_of_the_server(run: Run, s3: ObjectStore) -> None:
    run.save_and_upload(1)
    save(run.store(), 2)
    target = f"{run.url.removeprefix('s3:/')}/step-00000002/optimizer"
    s3.misbehave({"method": "PUT", "path": target, "wait": 100_000})
    pauses: list[float] = []
    lock = threading.Lock()

    def kill() -> None:
        wait_for_request(s3, f"PUT {target}")
        s3.kill()

    def back(seconds: float) -> None:
        with lock:  # several files are uploaded concurrently
            pauses.append(seconds)
            if len(pauses) == 1:
                s3.misbehave()
                s3.start()

    killer = threading.Thread(target=kill)
    killer.start()
    run.remote(ObjectStoreClient(run.url, 2, back)).upload(run.root / "step-00000002")
    killer.join()
    assert pauses and set(pauses) <= {1.0, 2.0}
    assert run.fetch_on_new_machine() == 2
    assert verify_remote(ObjectStoreClient(run.url), 2) == []


def test_failed_uploads_are_reported_and_repeated_later(run: Run, s3: ObjectStore) -> None:
    """Uploads fail for two checkpoints; with the third, all missing ones are uploaded, the oldest first."""
    config = CheckpointConfig(remote=run.url, retries=0, keep_last=3)

    def tiers(store: CheckpointStore) -> Tiers:
        return Tiers(
            config,
            store,
            RunId(run.folder, run.name),
            0,
            HostGroup(),
            make_client=lambda url, n: ObjectStoreClient(url, n, no_pause),
        )

    store = run.store()
    kept = tiers(store)
    save(store, 1)
    assert [(event.kind, event.step) for event in kept.upload()] == [("remote", 1)]
    s3.misbehave({"method": "PUT", "path": "/corpus", "status": 503, "code": "SlowDown"})
    for step in (2, 3):
        save(store, step)
        [event] = kept.upload()
        assert (event.kind, event.step) == ("remote_failed", 2) and "HTTP 503 SlowDown" in event.message
        assert_is_step(store.newest(), step)
    s3.misbehave()
    save(store, 4)
    store.prune()
    assert [(event.kind, event.step) for event in kept.upload()] == [("remote", step) for step in (2, 3, 4)]
    assert ObjectStoreClient(run.url).list_names() == ["run.json", *(f"step-{step:08d}" for step in (2, 3, 4))]

    s3.misbehave(
        *({"method": method, "path": "/corpus", "status": 503, "code": "SlowDown"} for method in ("GET", "HEAD"))
    )
    again = tiers(run.store())
    assert_is_step(again.newest(), 4)
    assert [event.kind for event in again.events] == ["remote_failed", "remote_failed"]
    with pytest.raises(StorageError, match="HTTP 503"):  # without the store, the id of this run is unknown
        Tiers(config, run.on_new_machine().store(), RunId(run.on_new_machine().folder, run.name), 0, HostGroup())


# --- one run per prefix --------------------------------------------------------------------------------------------


def test_the_marker_is_never_overwritten(run: Run, s3: ObjectStore) -> None:
    """If two runs commit the same step at the same time, the first one wins and the second gets an error."""

    class RacingClient(ObjectStoreClient):
        def create(self, name: str, data: bytes) -> bytes:
            if name.endswith("COMMITTED"):
                super().create(name, b"another")
            return super().create(name, data)

    folder = save(run.store(), 1)
    with pytest.raises(CheckpointError, match=f"{run.url}/step-00000001: is a different checkpoint of that step"):
        run.remote(RacingClient(run.url, 0, no_pause)).upload(folder)
    marker = objects_of(s3, run.url) / "step-00000001" / "COMMITTED"
    assert marker.read_bytes() == b"another"
    kept = Tiers(CheckpointConfig(remote=run.url), run.store(), RunId(run.folder, run.name), 0, HostGroup())
    [event] = kept.upload()
    assert event.kind == "remote_failed" and event.step == 1 and "two runs" in event.message.lower()
    assert marker.read_bytes() == b"another"


def test_a_prefix_belongs_to_one_run(run: Run, tmp_path: Path) -> None:
    run.save_and_upload(1)
    with pytest.raises(CheckpointError, match=f"{run.url}: contains the checkpoints of the run tiny"):
        Run(tmp_path / "b", run.url, name="other").remote().claim()
    known = Run(tmp_path / "c", run.url)
    RunId(known.folder, known.name).ensure()
    with pytest.raises(CheckpointError, match="of another run with the same name, tiny"):
        known.remote().fetch_newest(known.root, None)
    moved = run.on_new_machine()
    moved.remote().claim()
    assert RunId(moved.folder, "tiny").stored() == RunId(run.folder, "tiny").stored() is not None


def test_a_damaged_local_checkpoint_is_not_uploaded(run: Run) -> None:
    folder = save(run.store(), 1)
    file = folder / "model__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model__0_0\.distcp: does not match its checksum"):
        run.remote().upload(folder)
    assert run.fetch_on_new_machine() is None


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


def test_an_id_is_drawn_once_and_a_damaged_one_is_an_error_that_names_the_file(tmp_path):
    run_id = RunId(tmp_path, "name")
    assert run_id.stored() is None
    drawn = run_id.ensure()
    assert RunId(tmp_path, "name").ensure() == drawn and len(bytes.fromhex(drawn)) == 16
    (tmp_path / ".run-id").write_bytes(b"ab\x00\xc5\xff")
    with pytest.raises(CheckpointError, match=r"\.run-id: is damaged"):
        RunId(tmp_path, "name").ensure()
    assert (tmp_path / ".run-id").read_bytes() == b"ab\x00\xc5\xff", "nothing is lost"
